"""Gang scheduling: how long a group may hold nodes for some of its stages only, and which group tries first.

Kubernetes places pod by pod, so two groups can each take half of what is free and wait for the other's half for ever.
So a group that has nodes for some of its stages only gives them back after a time, and tries again later. Two rules
end the deadlock: of a model's groups of one revision only the first in order keeps its place while the others step
back, and limits and waits differ between models by a jitter, so that one of two steps back before the other and finds
it placed after.
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
    """Of each revision the lowest index of a group that waits for nodes, or gave some back.

    It alone keeps partial placements. Revisions don't wait for each other: one that can't be placed at all would keep
    groups of the other down for as long as nobody goes back on it.
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
    """Whether no group of its revision with a lower index looks for nodes: then this one may."""
    return first_unplaced is None or group.index <= first_unplaced


def held_until(context: Context, group: GroupStatus, pods: Sequence[ObservedPod], is_first: bool) -> datetime | None:
    """When a group must give its nodes, or its places in a quota, back; None while it holds none, or has all."""
    placed = [pod for pod in pods if pod.placed]
    needed = max(context.stage_count(group), len(pods))
    if not pods or len(placed) == needed or (not placed and len(pods) == needed):
        return None
    started = group.since or context.now
    held_since = max(started, min((pod.placed_at or started for pod in placed), default=started))
    seconds = context.model.spec.timeouts.scheduling_seconds
    # The first of a model's groups holds on for longer than those after it, and differently long in each model.
    patience = 1.1 + context.jitter(group) / 2 if is_first else 1.0
    return held_since + timedelta(seconds=seconds * patience)


def next_try(context: Context, group: GroupStatus) -> datetime:
    """When a group that gave its nodes back tries again: the wait doubles, and a jitter spreads groups."""
    longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(group.attempts, 10))
    return context.now + timedelta(seconds=longest * (0.5 + context.jitter(group) / 2))
