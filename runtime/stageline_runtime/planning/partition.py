"""Divides equal layers among stages: the slowest stage as fast as possible, then the next slowest, and so on.

Greedy: every stage starts with one layer, and each further layer goes to the stage that is cheapest with it and whose
host has room. That is exact: the divisions that hosts can hold are the bases of a polymatroid (limits on disjoint sets
of stages), where the greedy choice gives the lexicographically best one (Fujishige, "Lexicographically optimal base of
a polymatroid with respect to a weight vector", Mathematics of Operations Research 5(2), 1980). Pure.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Cost of one stage: `fixed` plus `per_layer` for each of its layers."""

    fixed: float
    per_layer: float

    def of(self, num_layers: int) -> float:
        """Cost with `num_layers` layers."""
        return self.fixed + num_layers * self.per_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """Stages that share a host, and the most layers that fit there together (negative when not even the ends fit)."""

    stages: tuple[int, ...]
    most_layers: int


def partition(num_layers: int, costs: Sequence[LinearCost], rooms: Sequence[HostRoom] = ()) -> tuple[int, ...] | None:
    """Layers per stage, at least one each, in the order of `costs`; None when no division fits the rooms.

    A stage that no room names has no limit. Among equals, layers go to the later stage. Needs as many layers as stages.
    """
    counts = [1] * len(costs)
    left = [room.most_layers - len(room.stages) for room in rooms]
    if any(layers < 0 for layers in left):
        return None
    room_of = {stage: index for index, room in enumerate(rooms) for stage in room.stages}
    queue = [(cost.of(2), -stage) for stage, cost in enumerate(costs)]
    heapq.heapify(queue)
    for _ in range(num_layers - len(costs)):
        while queue and (room := room_of.get(-queue[0][1])) is not None and left[room] == 0:
            heapq.heappop(queue)
        if not queue:
            return None
        stage = -queue[0][1]
        counts[stage] += 1
        if stage in room_of:
            left[room_of[stage]] -= 1
        heapq.heapreplace(queue, (costs[stage].of(counts[stage] + 1), -stage))
    return tuple(counts)
