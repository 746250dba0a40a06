"""What changed between two statuses, as numbers: failures, restarts, times to ready and to recover. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stageline_api import labels
from stageline_api.resource.status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_operator.planner.types import GroupPhase


@dataclass(frozen=True)
class Transition:
    """Failure classes of groups that failed and of groups that begin again, and durations that ended."""

    failures: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    time_to_ready_seconds: tuple[float, ...] = ()
    recovery_seconds: tuple[float, ...] = ()


def transition_between(
    before: PipelineModelStatus, after: PipelineModelStatus, pods: Iterable[Mapping[str, Any]], now: datetime
) -> Transition:
    """Compare two statuses; the creation times of `pods`, those of the model, say how long a group took."""
    known = {group.index: group for group in before.groups}
    made = _first_creation(pods)
    restarted = [group for group in after.groups if _is_next_life(known.get(group.index), group)]
    became_ready = [group for group in after.groups if _became_ready(known.get(group.index), group)]
    failures_of_restarted = [_failure_before(after, group) for group in restarted]
    starts = [made.get((group.index, group.incarnation)) for group in became_ready]
    failures = [_failure_before(after, group) for group in became_ready]
    new = [failure for failure in after.last_failures if failure not in before.last_failures]
    return Transition(
        failures=tuple(str(failure.failure_class) for failure in new),
        restarts=tuple(str(each.failure_class) for each in failures_of_restarted if each is not None),
        time_to_ready_seconds=tuple((now - start).total_seconds() for start in starts if start is not None),
        recovery_seconds=tuple((now - failure.time).total_seconds() for failure in failures if failure is not None),
    )


def _is_next_life(before: GroupStatus | None, after: GroupStatus) -> bool:
    return before is not None and after.incarnation > before.incarnation


def _became_ready(before: GroupStatus | None, after: GroupStatus) -> bool:
    if after.phase != GroupPhase.READY:
        return False
    return before is None or before.phase != GroupPhase.READY or before.incarnation != after.incarnation


def _failure_before(status: PipelineModelStatus, group: GroupStatus) -> FailureRecord | None:
    """The failure that this incarnation replaces; None when the one before it was replaced for another reason."""
    own = (each for each in status.last_failures if each.group == group.index)
    return next((each for each in own if each.incarnation == group.incarnation - 1), None)


def _first_creation(pods: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], datetime]:
    """When the first pod of each (group, incarnation) was made."""
    first: dict[tuple[int, int], datetime] = {}
    for pod in pods:
        own, created = pod["metadata"]["labels"], pod["metadata"].get("creationTimestamp")
        if created is None:
            continue
        life = (int(own[labels.GROUP]), int(own[labels.INCARNATION]))
        moment = datetime.fromisoformat(created)
        first[life] = min(moment, first.get(life, moment))
    return first
