"""Gang scheduling: how long a group may hold a partial placement, and which group keeps its place.

Kubernetes places pod by pod. Two groups can each take half of the free nodes and wait for the other half forever. So a
group with a partial placement releases its nodes after a time and tries again later. Two rules end the deadlock. Among
a model's groups of one revision, only the first keeps its place while the others release theirs. Between models, limits
and waits differ by a jitter, so that one of two groups releases its nodes first and finds the other one placed.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from stageline_api.resource.life.status import GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.observed.observed_pod import ObservedPod
from stageline_operator.planner.types import GroupPhase

FIRST_WAIT_SECONDS: Final = 5.0
LONGEST_WAIT_SECONDS: Final = 60.0
_PLACE_SEEKING: Final = (GroupPhase.CREATING, GroupPhase.STARTING)


def find_first_unplaced(
    groups: Sequence[GroupStatus], pods_of: Mapping[int, Sequence[ObservedPod]], stage_counts: Mapping[int, int]
) -> dict[str, int]:
    """For each revision, the lowest index of a group that waits for nodes or has released some.

    Only that group keeps a partial placement. Revisions don't wait for each other: a revision that can't be placed
    would otherwise keep the other revision's groups down until a user reverts it.
    """
    first: dict[str, int] = {}
    for each in groups:
        if _is_unplaced(each, pods_of, stage_counts):
            first[each.revision] = min(each.index, first.get(each.revision, each.index))
    return first


def _is_unplaced(
    group: GroupStatus, pods_of: Mapping[int, Sequence[ObservedPod]], stage_counts: Mapping[int, int]
) -> bool:
    if group.phase == GroupPhase.WAITING:
        return True
    own = (pod for pod in pods_of.get(group.index, ()) if pod.incarnation == group.incarnation)
    placed = {pod.stage for pod in own if pod.placed}
    return group.phase in _PLACE_SEEKING and len(placed) < stage_counts[group.index]


def keeps_its_place(group: GroupStatus, first_unplaced: int | None) -> bool:
    """Whether no group of its revision with a lower index waits for nodes."""
    return first_unplaced is None or group.index <= first_unplaced


def held_until(context: Context, group: GroupStatus, pods: Sequence[ObservedPod], is_first: bool) -> datetime | None:
    """When the group must release its nodes or its share of a quota; None if it holds none or all of them."""
    placed = [pod for pod in pods if pod.placed]
    needed = max(context.stage_count(group), len(pods))
    if not pods or len(placed) == needed or (not placed and len(pods) == needed):
        return None
    started = group.since or context.now
    held_since = max(started, min((pod.placed_at or started for pod in placed), default=started))
    seconds = context.model.spec.timeouts.scheduling_seconds
    # The first of a model's groups holds its place longer than the others, by a time that differs between models.
    patience = 1.1 + context.jitter(group) / 2 if is_first else 1.0
    return held_since + timedelta(seconds=seconds * patience)


def next_try(context: Context, group: GroupStatus) -> datetime:
    """When a group that released its nodes tries again. The wait doubles each time; a jitter spreads the groups."""
    longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(group.attempts, 10))
    return context.now + timedelta(seconds=longest * (0.5 + context.jitter(group) / 2))
