"""Collects all that is known of one model into files of a debug bundle, in memory, with secrets taken out.

What can't be collected is listed with its reason, and never stops the rest: the bundle is made when things are broken.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from stageline_api import labels
from stageline_api.errors import UserError
from stageline_cli.on_call.bundle.document import as_json, as_yaml, snapshot_document
from stageline_cli.on_call.bundle.index import index_page
from stageline_cli.on_call.bundle.redaction import Redactor, redact_object, secret_values
from stageline_cli.on_call.bundle.text_page import text_page
from stageline_cli.on_call.bundle.versions import versions
from stageline_cli.on_call.facts.facts import ModelFacts, Snapshot
from stageline_cli.on_call.facts.readings import TIMEOUT_SECONDS, pod_endpoints
from stageline_cli.on_call.sources.last_words import last_words
from stageline_cli.on_call.sources.source import ModelObjects, Piece, Source
from stageline_cli.on_call.views.status_view import model_view
from stageline_runtime.trace.collect import collect
from stageline_runtime.trace.lanes import common_window
from stageline_runtime.trace.perfetto import perfetto_json

_TRACES: Final = "traces/"


@dataclass(frozen=True)
class Bundle:
    """Files by path, and what is missing with its reason."""

    files: Mapping[str, str]
    missing: Mapping[str, str]


def collect_bundle(source: Source, model: ModelObjects, snapshot: Snapshot, trace_seconds: float) -> Bundle:
    """Everything of `model`; `snapshot` is about it alone."""
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
    """What running pods and gateways answer."""
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
            yield Piece(path, missing=f"the group is {group.phase} and has no running engine to ask")
            continue
        try:
            served, timelines, _ = collect(http, url, seconds)
            title = f"{served.served_name} group {group.group}, incarnation {served.incarnation}"
            yield Piece(path, perfetto_json(timelines, common_window(timelines), title=title))
        except UserError as error:
            yield Piece(path, missing=error.message)


def _document(piece: Piece) -> Any:
    """The object that a piece holds; None when it is other text."""
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
