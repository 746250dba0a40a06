"""What changed between two statuses, as numbers: failures, restarts, times to ready and to recover. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stageline_api import labels
from stageline_api.resource.life.status import FailureRecord, GroupStatus, PipelineModelStatus
from stageline_operator.controller.telemetry.startup import Startup, startup_of
from stageline_operator.planner.types import GroupPhase


@dataclass(frozen=True)
class Transition:
    """Failure classes of groups that failed and of groups that restart, and finished durations."""

    failures: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    startups: tuple[Startup, ...] = ()
    recoveries: tuple[tuple[str, float], ...] = ()
    """Class of the failure, and seconds since it."""


def transition_between(
    before: PipelineModelStatus, after: PipelineModelStatus, pods: Iterable[Mapping[str, Any]], now: datetime
) -> Transition:
    """Compare two statuses; the model's `pods` give the start times."""
    known = {group.index: group for group in before.groups}
    lives = _by_life(pods)
    restarted = [group for group in after.groups if _is_next_life(known.get(group.index), group)]
    became_ready = [group for group in after.groups if _became_ready(known.get(group.index), group)]
    failures_of_restarted = [_failure_before(after, group) for group in restarted]
    startups = [startup_of(lives[group.index, group.incarnation], now) for group in became_ready]
    failures = [_failure_before(after, group) for group in became_ready]
    new = [failure for failure in after.last_failures if failure not in before.last_failures]
    return Transition(
        failures=tuple(str(failure.failure_class) for failure in new),
        restarts=tuple(str(each.failure_class) for each in failures_of_restarted if each is not None),
        startups=tuple(each for each in startups if each is not None),
        recoveries=tuple(
            (str(failure.failure_class), (now - failure.time).total_seconds())
            for failure in failures
            if failure is not None
        ),
    )


def _is_next_life(before: GroupStatus | None, after: GroupStatus) -> bool:
    return before is not None and after.incarnation > before.incarnation


def _became_ready(before: GroupStatus | None, after: GroupStatus) -> bool:
    if after.phase != GroupPhase.READY:
        return False
    return before is None or before.phase != GroupPhase.READY or before.incarnation != after.incarnation


def _failure_before(status: PipelineModelStatus, group: GroupStatus) -> FailureRecord | None:
    """The failure that this incarnation follows; None if its predecessor was replaced for another reason."""
    own = (each for each in status.last_failures if each.group == group.index)
    return next((each for each in own if each.incarnation == group.incarnation - 1), None)


def _by_life(pods: Iterable[Mapping[str, Any]]) -> Mapping[tuple[int, int], list[Mapping[str, Any]]]:
    """The pods of each (group, incarnation)."""
    lives: defaultdict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for pod in pods:
        own = pod["metadata"]["labels"]
        lives[int(own[labels.GROUP]), int(own[labels.INCARNATION])].append(pod)
    return lives
