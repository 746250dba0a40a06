"""How the containers of a pod ended, why one can't start, and whether one has begun."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

FATAL_WAITING_REASONS: Final = frozenset({"CreateContainerError", "RunContainerError"})
ENDS_OF_PODS: Final = frozenset({"DeadlineExceeded", "Evicted", "NodeLost", "NodeShutdown", "Preempting", "Terminated"})
"""Reasons for which running pods end as a whole. Any other reason of a failed pod is a rejection by its kubelet."""
_UNKNOWN: Final = "ContainerStatusUnknown"
"""The kubelet's reason for a container that it can't find, whether or not it ever ran."""


@dataclass(frozen=True)
class ContainerEnd:
    """How one container ended, or why it can't start (`exit_code` None)."""

    stage: int
    container: str
    exit_code: int | None
    signal: int
    reason: str
    message: str
    finished_at: datetime


def container_statuses(status: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Each container's status, and whether it may complete (an init container)."""
    for each in status.get("initContainerStatuses", []):
        yield each, True
    for each in status.get("containerStatuses", []):
        yield each, False


def has_begun(container: Mapping[str, Any]) -> bool:
    """Whether a container ever ran, from its status."""
    state = container.get("state", {})
    if container.get("lastState") or container.get("restartCount"):
        return True
    ended = state.get("terminated")
    if ended is not None and ended.get("reason") == _UNKNOWN:
        return bool(container.get("containerID") or ended.get("containerID") or ended.get("startedAt"))
    return ended is not None or "running" in state


def is_refused(status: Mapping[str, Any]) -> bool:
    """Whether a pod failed without a container's end: its kubelet rejected it, perhaps after a restart."""
    if status.get("phase") != "Failed":
        return False
    began = any(has_begun(each) for each, _ in container_statuses(status))
    return not began or bool(status.get("reason") and status["reason"] not in ENDS_OF_PODS)


def container_ends(status: Mapping[str, Any], stage: int, now: datetime) -> Iterator[ContainerEnd]:
    """Every end in a pod's status; `now` replaces a missing time."""
    if is_refused(status):
        return
    if status.get("phase") == "Failed" and status.get("reason"):
        # The pod failed as a whole (`Evicted`, `NodeLost`); its containers' ends are only symptoms.
        yield ContainerEnd(stage, "", None, 0, status["reason"], status.get("message", ""), now)
        return
    for each, may_complete in container_statuses(status):
        match each.get("state", {}):
            case {"terminated": ended} if has_begun(each) and not (may_complete and ended["exitCode"] == 0):
                finished = moment(ended.get("finishedAt")) or now
                words = ended.get("message", "") or ""
                signal = ended.get("signal") or max(0, ended["exitCode"] - 128)
                yield ContainerEnd(
                    stage, each["name"], ended["exitCode"], signal, ended.get("reason", ""), words, finished
                )
            case {"waiting": waiting} if waiting.get("reason") in FATAL_WAITING_REASONS:
                reason, words = waiting["reason"], waiting.get("message", "")
                yield ContainerEnd(stage, each["name"], None, 0, reason, words, now)


def moment(text: str | None) -> datetime | None:
    """Parse a Kubernetes timestamp; one without a zone is UTC."""
    if not text:
        return None
    parsed = datetime.fromisoformat(text)
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
