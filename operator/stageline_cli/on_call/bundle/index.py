"""The first page of a debug bundle: what happened, in which file to look for what, and what is missing. Pure."""

from collections.abc import Mapping
from typing import Final

from stageline_cli.on_call.facts.facts import Snapshot

_MEANINGS: Final = {
    "status.txt": "all of it for people, as `stageline status` shows it; `status.json` for programs",
    "pipelinemodel.yaml": "the PipelineModel, spec and status",
    "pods/": "the pods, with their status",
    "ended-pods/": "pods that ended lately, as they were last seen",
    "last-words/": "how containers ended, in their own words; `failures.yaml`: causes kept over incarnations",
    "events.yaml": "Kubernetes Events of the model and its pods, oldest first",
    "logs/": "the end of each container's log; `.previous.log` is from before a restart",
    "logs.previous/": "logs of the `stageline up` before this one",
    "metrics/": "one scrape of each stage, engine and gateway",
    "answers/": "what stages, engines and gateways say of themselves",
    "traces/": "what every stage did; open at https://ui.perfetto.dev",
    "objects/": "ConfigMaps and Services of the model",
    "nodes/": "the nodes of its pods: conditions, room, taints",
    "components/": "operator and gateway: pods and logs",
    "versions/": "versions here and of the cluster",
}


def index_page(snapshot: Snapshot, files: Mapping[str, str], missing: Mapping[str, str]) -> str:
    """Markdown."""
    model = snapshot.models[0]
    lines = [
        f"# Debug bundle of {model.namespace}/{model.name}",
        "",
        f"Made at {snapshot.taken_at.isoformat(timespec='seconds')}, {snapshot.where}. The model is {model.health}: "
        f"{model.ready_groups} of {model.wanted_groups} groups are ready.",
        "",
        *(f"- group {group.group}: {group.phase}" + _waits(group.waits_for) for group in model.groups),
        *(
            f"- last failure: group {one.group} incarnation {one.incarnation} stage {one.stage}, {one.failure_class}: "
            f"{one.message}"
            for one in model.failures[:1]
        ),
        "",
        "Values that are or look like secrets read `[redacted]`, and no Secret was read. Look through it all the same "
        "before you send it on: what your own containers log is unknown to Stageline.",
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
