"""Which groups there should be: whom to make, whom to drain, and whose turn it is in a rollout. Pure arithmetic.

A rollout goes by two bounds, in whole groups: never more than `replicas + maxSurge` groups, and never fewer than
`replicas - maxUnavailable` that serve, unless they failed. While there is room for another group, one of the new
revision is made under the lowest free index; while more serve than must, an old one is drained: for good when there
are groups enough without it, else to be made anew in its place. Groups that don't serve are no loss and go first.
So the set of indices may move with a rollout, and no model is loaded more often than it must be.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from stageline_api.resource.status import GroupStatus
from stageline_operator.planner.context import Context
from stageline_operator.planner.types import GroupPhase


class Turn(Enum):
    """What a group on record may do in this pass."""

    STAY = auto()
    REPLACE = auto()
    """Drain and be made anew at the current revision."""
    REMOVE = auto()


@dataclass(frozen=True)
class Roster:
    """`made` are indices of groups to begin."""

    turns: dict[int, Turn] = field(default_factory=dict)
    made: tuple[int, ...] = ()

    def turn_of(self, group: GroupStatus) -> Turn:
        """The turn of a group on record; one that is being drained for good goes on."""
        return self.turns.get(group.index, Turn.REMOVE)


def call_roster(context: Context, groups: Sequence[GroupStatus], serving: Collection[int]) -> Roster:
    """The turns of all groups on record; `serving` are the indices of those whose every stage is ready."""
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
    leaving = _may_leave(context, target, staying, rolling, outdated, serving)
    surplus = len(staying) - target
    for index in leaving:
        turns[index] = Turn.REMOVE if surplus > 0 else Turn.REPLACE
        surplus -= 1
    missing = max(0, target - sum(turn is not Turn.REMOVE for turn in turns.values()))
    # Pods that still drain hold their nodes: a surge waits until they are gone.
    waits_for_room = [index for index in rolling if turns[index] is Turn.STAY]
    surge = max(0, min(ceiling - len(groups) - missing, len(waits_for_room)))
    taken = {group.index for group in groups}
    return Roster(turns, tuple(_lowest_free(taken, missing + surge)))


def _kept(context: Context, outdated: Collection[int], serving: Collection[int]) -> set[int]:
    """Outdated groups that `partition` leaves alone: those that serve, lowest index first."""
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
) -> list[int]:
    """Groups of an old revision that may go now: those that don't serve, and as many others as may be missing."""
    rollout = context.model.spec.rollout
    serving_now = [index for index in staying if index in serving]
    spare = len(serving_now) - max(0, target - rollout.max_unavailable)
    has_new = any(index not in outdated for index in serving_now)
    if not has_new and (target > 1 or rollout.max_surge > 0):
        spare = min(spare, len(serving_now) - 1)  # the last that serves stays until a new one does
    idle = sorted((index for index in rolling if index not in serving), reverse=True)
    return idle + sorted(index for index in rolling if index in serving)[: max(0, spare)]


def _lowest_free(taken: Collection[int], count: int) -> list[int]:
    free: list[int] = []
    index = 0
    while len(free) < count:
        if index not in taken:
            free.append(index)
        index += 1
    return free
