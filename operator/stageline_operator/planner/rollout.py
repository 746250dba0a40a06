"""Which groups a pass creates, replaces and removes, for scaling and rolling updates. Pure arithmetic.

A rollout keeps two bounds, in whole groups: at most `replicas + maxSurge` groups exist, and at least `replicas -
maxUnavailable` serve, unless they failed. If the first bound allows another group, one of the new revision is created
at the lowest free index. If the second bound allows it, an outdated group is drained. It is removed if enough others
remain, else replaced in place. Groups that don't serve are drained first, which costs nothing, except groups that
served before and are restarting. So a rollout may change the set of indices, and loads each replica's weights once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from stageline_api.resource.life.status import GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.types import GroupPhase

_COMING_BACK = (
    GroupPhase.READY,
    GroupPhase.CREATING,
    GroupPhase.STARTING,
    GroupPhase.TERMINATING,
    GroupPhase.BACKING_OFF,
    GroupPhase.WAITING,
)


class Turn(Enum):
    """What the rollout does with a recorded group in this pass."""

    STAY = auto()
    REPLACE = auto()
    """Drain it, then create it again at the current revision."""
    REMOVE = auto()


@dataclass(frozen=True)
class Rollout:
    """`created` are the indices of groups to create."""

    turns: dict[int, Turn] = field(default_factory=dict)
    created: tuple[int, ...] = ()

    def turn_of(self, group: GroupStatus) -> Turn:
        """The turn of a recorded group; a group that is being removed stays in removal."""
        return self.turns.get(group.index, Turn.REMOVE)


def plan_rollout(context: Context, groups: Sequence[GroupStatus], serving: Collection[int]) -> Rollout:
    """The turns of all recorded groups; `serving` are the indices of groups whose stages are all ready."""
    spec = context.model.spec
    target = 0 if spec.suspend else spec.replicas
    active = {group.index: group for group in groups if group.phase != GroupPhase.DRAINING}
    outdated = {index for index, group in active.items() if group.revision != context.revision}
    kept = _kept(context, outdated, serving)
    rolling = outdated - kept
    ceiling = target + (spec.rollout.max_surge if rolling and target else 0)
    turns = dict.fromkeys(active, Turn.STAY)
    for index in _least_wanted(active, outdated, serving)[: max(0, len(active) - ceiling)]:
        turns[index] = Turn.REMOVE
        rolling.discard(index)
    staying = [index for index, turn in turns.items() if turn is Turn.STAY]
    leaving = _may_leave(context, target, staying, rolling, outdated, serving, active)
    surplus = len(staying) - target
    for index in leaving:
        turns[index] = Turn.REMOVE if surplus > 0 else Turn.REPLACE
        surplus -= 1
    missing = max(0, target - sum(turn is not Turn.REMOVE for turn in turns.values()))
    # Draining pods hold their nodes: a surge waits until they are gone.
    waits_for_room = [index for index in rolling if turns[index] is Turn.STAY]
    surge = max(0, min(ceiling - len(groups) - missing, len(waits_for_room)))
    taken = {group.index for group in groups}
    return Rollout(turns, tuple(_lowest_free(taken, missing + surge)))


def _kept(context: Context, outdated: Collection[int], serving: Collection[int]) -> set[int]:
    """Outdated groups that `partition` keeps: serving ones, lowest index first."""
    ordered = sorted(outdated, key=lambda index: (index not in serving, index))
    return set(ordered[: context.model.spec.rollout.partition])


def _least_wanted(active: Collection[int], outdated: Collection[int], serving: Collection[int]) -> list[int]:
    return sorted(active, key=lambda index: (index in serving, index not in outdated, -index))


def _may_leave(
    context: Context,
    target: int,
    staying: Collection[int],
    rolling: Collection[int],
    outdated: Collection[int],
    serving: Collection[int],
    groups: Mapping[int, GroupStatus],
) -> list[int]:
    """Outdated groups that may be drained now: those that do not serve, and as many others as the bounds allow.

    A group that served and then failed restarts at its old revision until a group of the new revision serves. Otherwise
    a new revision that never becomes ready would replace each group that fails.
    """
    rollout = context.model.spec.rollout
    serving_now = [index for index in staying if index in serving]
    spare = len(serving_now) - max(0, target - rollout.max_unavailable)
    has_new = any(index not in outdated for index in serving_now)
    if not has_new and (target > 1 or rollout.max_surge > 0):
        spare = min(spare, len(serving_now) - 1)  # keep the last serving group until a new one serves
    unproven = sum(index not in outdated and index not in serving for index in staying)
    has_room = rollout.max_surge == 0 and unproven < rollout.max_unavailable
    idle = sorted((index for index in rolling if index not in serving), reverse=True)
    if not (has_new or has_room):
        idle = [index for index in idle if not _comes_back(groups[index])]
    return idle + sorted(index for index in rolling if index in serving)[: max(0, spare)]


def _comes_back(group: GroupStatus) -> bool:
    return group.served and group.phase in _COMING_BACK


def _lowest_free(taken: Collection[int], count: int) -> list[int]:
    free: list[int] = []
    index = 0
    while len(free) < count:
        if index not in taken:
            free.append(index)
        index += 1
    return free
