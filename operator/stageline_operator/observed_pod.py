"""A pod manifest with status, read once into the few facts that planning needs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from stageline_api import labels

FATAL_WAITING_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerError", "RunContainerError"}
)


@dataclass(frozen=True)
class ContainerEnd:
    """How one container ended, or why it will never start (`exit_code` None)."""

    stage: int
    container: str
    exit_code: int | None
    signal: int
    reason: str
    message: str
    finished_at: datetime


@dataclass(frozen=True)
class ObservedPod:
    """One stage pod. `note` is a sentence about what it waits for."""

    name: str
    group: int
    incarnation: int
    stage: int
    revision: str
    node: str
    ready: bool
    deleting: bool
    note: str
    ends: tuple[ContainerEnd, ...]


def read_pod(pod: Mapping[str, Any], now: datetime) -> ObservedPod:
    """Read a pod; raises `KeyError` when it lacks Stageline's labels (the observer selects by them)."""
    metadata, status = pod["metadata"], pod.get("status", {})
    own_labels = metadata["labels"]
    stage = int(own_labels[labels.STAGE])
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    return ObservedPod(
        name=metadata["name"],
        group=int(own_labels[labels.GROUP]),
        incarnation=int(own_labels[labels.INCARNATION]),
        stage=stage,
        revision=own_labels.get(labels.REVISION, ""),
        node=pod.get("spec", {}).get("nodeName", ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        note=_note(status, conditions),
        ends=tuple(_ends(status, stage, now)),
    )


def _container_statuses(status: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Each container's status, and whether ending well is what it is for."""
    for each in status.get("initContainerStatuses", []):
        yield each, True
    for each in status.get("containerStatuses", []):
        yield each, False


def _ends(status: Mapping[str, Any], stage: int, now: datetime) -> Iterator[ContainerEnd]:
    if status.get("phase") == "Failed" and status.get("reason"):
        # The pod as a whole failed (`Evicted`, `NodeLost`); its containers' own ends are only how that looked.
        yield ContainerEnd(stage, "", None, 0, status["reason"], status.get("message", ""), now)
        return
    for each, may_complete in _container_statuses(status):
        match each.get("state", {}):
            case {"terminated": ended} if not (may_complete and ended["exitCode"] == 0):
                finished = _moment(ended.get("finishedAt"), now)
                words = ended.get("message", "") or ""
                signal = ended.get("signal") or max(0, ended["exitCode"] - 128)
                yield ContainerEnd(
                    stage, each["name"], ended["exitCode"], signal, ended.get("reason", ""), words, finished
                )
            case {"waiting": waiting} if waiting.get("reason") in FATAL_WAITING_REASONS:
                reason, words = waiting["reason"], waiting.get("message", "")
                yield ContainerEnd(stage, each["name"], None, 0, reason, words, now)


def _note(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or scheduled.get("reason", ""))
    for each, _ in _container_statuses(status):
        match each.get("state", {}):
            case {"waiting": waiting} if waiting.get("reason") not in ("PodInitializing", "ContainerCreating"):
                return f"{each['name']}: {waiting.get('reason', '')}: {waiting.get('message', '')}".rstrip(": ")
            case {"terminated": {"exitCode": int(code)}} if code != 0:
                return f"{each['name']} ended with exit status {code}"
            case {"running": _} if not each.get("ready"):
                return f"{each['name']} is starting"
    return ""


def _moment(text: str | None, otherwise: datetime) -> datetime:
    if text is None:
        return otherwise
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
