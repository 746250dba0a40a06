"""Collects the files of a model's debug bundle, in memory, with secrets removed.

Files that can't be collected are listed with the reason in the bundle's README.md and never stop the rest: bundles are
made when things are broken.
"""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import httpx

from stageline_api import labels
from stageline_api.errors import UserError
from stageline_api.failures import place_of
from stageline_cli.on_call.bundle.document import as_json, as_yaml, snapshot_document, text_page
from stageline_cli.on_call.bundle.redaction import Redactor, redact_object, secret_values
from stageline_cli.on_call.facts.facts import ModelFacts, Snapshot
from stageline_cli.on_call.facts.scrape import TIMEOUT_SECONDS, pod_endpoints
from stageline_cli.on_call.sources.source import ModelObjects, Piece, Source, last_words
from stageline_cli.on_call.views.status_view import model_view
from stageline_runtime.trace.collect import collect
from stageline_runtime.trace.lanes import common_window
from stageline_runtime.trace.perfetto import perfetto_json

_TRACES: Final = "traces/"


@dataclass(frozen=True)
class Bundle:
    """Files by path, and missing files with the reason."""

    files: Mapping[str, str]
    missing: Mapping[str, str]


def collect_bundle(source: Source, model: ModelObjects, snapshot: Snapshot, trace_seconds: float) -> Bundle:
    """The bundle of `model`; `snapshot` only contains this model."""
    pieces = [*_facts(model, snapshot), *source.pieces(model), *_asked(source.http, model)]
    pieces += _traces(source.http, snapshot.models[0], model, trace_seconds)
    known = [*source.secrets, *(value for piece in pieces for value in _secrets_in(piece))]
    redactor = Redactor(known)
    files = {piece.path: _redacted(piece, redactor) for piece in pieces if not piece.missing}
    missing = {piece.path: redactor.text(piece.missing) for piece in pieces if piece.missing}
    files["README.md"] = redactor.text(index_page(snapshot, files, missing))
    return Bundle(files, missing)


def _facts(model: ModelObjects, snapshot: Snapshot) -> Iterator[Piece]:
    yield Piece("status.txt", text_page(model_view(snapshot, snapshot.models[0], wide=True)))
    yield Piece("status.json", as_json(snapshot_document(snapshot)))
    yield Piece("versions/here.yaml", document=versions())
    yield Piece("pipelinemodel.yaml", document=model.manifest)
    yield from (Piece(f"pods/{pod['metadata']['name']}.yaml", document=pod) for pod in model.pods)
    for pod in model.pods:
        yield from last_words(pod)
    yield Piece("last-words/failures.yaml", document=model.manifest.get("status", {}).get("lastFailures", []))


def _asked(http: httpx.Client, model: ModelObjects) -> Iterator[Piece]:
    """Responses of running pods and gateways."""
    for pod in model.pods:
        name = pod["metadata"]["name"]
        for endpoint in pod_endpoints(pod):
            yield _page(http, f"{endpoint.url}/metrics", f"metrics/{name}.{endpoint.name}.prom")
            yield _page(http, f"{endpoint.url}/status", f"answers/{name}.{endpoint.name}.status.json")
    for number, gateway in enumerate(model.gateways):
        name = f"{gateway.name}-{number}" if len(model.gateways) > 1 else gateway.name
        yield _page(http, f"{gateway.url}/metrics", f"metrics/{name}.prom")
        yield _page(http, f"{gateway.url}/status", f"answers/{name}.status.json")


def _page(http: httpx.Client, url: str, path: str) -> Piece:
    try:
        answer = http.get(url, timeout=TIMEOUT_SECONDS)
    except httpx.HTTPError as error:
        return Piece(path, missing=str(error) or type(error).__name__)
    words = " ".join(answer.text.split())[:200]
    return Piece(path, answer.text) if answer.is_success else Piece(path, missing=f"{answer.status_code}: {words}")


def _traces(http: httpx.Client, facts: ModelFacts, model: ModelObjects, seconds: float) -> Iterator[Piece]:
    """A timeline of each group, for Perfetto."""
    engines = {
        pod["metadata"]["labels"].get(labels.GROUP): one.url
        for pod in model.pods
        for one in pod_endpoints(pod)
        if one.name == "engine"
    }
    for group in facts.groups:
        if model.group not in (None, group.group):
            continue
        path, url = f"{_TRACES}group-{group.group}.json", engines.get(str(group.group))
        if url is None:
            yield Piece(path, missing=f"the group is {group.phase} and has no running engine")
            continue
        try:
            served, timelines, _ = collect(http, url, seconds)
            title = f"{served.served_name} group {group.group}, incarnation {served.incarnation}"
            yield Piece(path, perfetto_json(timelines, common_window(timelines), title=title))
        except UserError as error:
            yield Piece(path, missing=error.message)


def _document(piece: Piece) -> Any:
    """The object in a piece; None if it is other text."""
    if piece.document is not None or not piece.path.endswith(".json"):
        return piece.document
    try:
        return json.loads(piece.text)
    except ValueError:
        return None


def _secrets_in(piece: Piece) -> Sequence[str]:
    return () if piece.path.startswith(_TRACES) else tuple(secret_values(_document(piece)))


def _redacted(piece: Piece, redactor: Redactor) -> str:
    if piece.path.startswith(_TRACES):
        return redactor.known(piece.text)
    document = _document(piece)
    if document is None:
        return redactor.text(piece.text)
    redacted = redact_object(document)
    return redactor.text(as_json(redacted) if piece.document is None else as_yaml(redacted))


_PACKAGES: Final = (
    "stageline",
    "torch",
    "transformers",
    "fastapi",
    "uvicorn",
    "kubernetes",
    "kopf",
    "httpx",
    "pydantic",
)


def versions() -> dict[str, str]:
    """Versions by package name; a missing package is listed as such."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed here"
    return found


_MEANINGS: Final = {
    "status.txt": "a summary for people, as `stageline status` shows it; `status.json` for programs",
    "pipelinemodel.yaml": "the PipelineModel, spec and status",
    "pods/": "the pods, with their status",
    "ended-pods/": "recently ended pods, in their last state",
    "last-words/": "termination messages of containers; `failures.yaml`: causes kept over incarnations",
    "events.yaml": "Kubernetes Events of the model and its pods, oldest first",
    "logs/": "the end of each container's log; `.previous.log` is from before a restart",
    "logs.previous/": "logs of the `stageline up` before this one",
    "metrics/": "one scrape of each stage, engine and gateway",
    "answers/": "status of stages, engines and gateways",
    "traces/": "activity of every stage; open at https://ui.perfetto.dev",
    "objects/": "ConfigMaps and Services of the model",
    "nodes/": "the nodes of its pods: conditions, capacity, taints",
    "components/": "operator and gateway: pods and logs",
    "versions/": "versions here and of the cluster",
}


def index_page(snapshot: Snapshot, files: Mapping[str, str], missing: Mapping[str, str]) -> str:
    model = snapshot.models[0]
    lines = [
        f"# Debug bundle of {model.namespace}/{model.name}",
        "",
        f"Made at {snapshot.taken_at.isoformat(timespec='seconds')}, {snapshot.where}. The model is {model.health}: "
        f"{model.ready_groups} of {model.wanted_groups} groups are ready.",
        "",
        *(f"- group {group.group}: {group.phase}" + _waits(group.waits_for) for group in model.groups),
        *(
            f"- last failure: group {one.group} incarnation {one.incarnation} {place_of(one.stage, one.rank)}, "
            f"{one.failure_class}: {one.message}"
            for one in model.failures[:1]
        ),
        "",
        "Values that are or look like secrets read `[redacted]`, and no Secret was read. Still review the archive "
        "before you send it: Stageline can't know what your own containers log.",
        "",
        "## Where to look",
        "",
        *(f"- `{place}`: {meaning}" for place, meaning in _MEANINGS.items() if _has(files, place)),
        "",
        "## What is missing, and why",
        "",
        *(f"- `{path}`: {reason}" for path, reason in sorted(missing.items())),
        *(f"- {problem}" for problem in snapshot.problems),
        *([] if missing or snapshot.problems else ["Nothing."]),
        "",
        "## All files",
        "",
        *(f"- `{path}` ({len(text.encode())} bytes)" for path, text in sorted(files.items())),
    ]
    return "\n".join(lines) + "\n"


def _has(files: Mapping[str, str], place: str) -> bool:
    return any(path.startswith(place) for path in files)


def _waits(words: str) -> str:
    return f", waits for {words}" if words else ""
