"""Cuts a model's layers into contiguous stages so that the slowest stage is as fast as it can be.

A pipeline runs at the pace of its slowest stage, so the cut minimises the largest stage cost, then the second largest
and so on, which makes the rest as even as can be. Stage 0 also pays for the embedding and the last stage
for the head and for sampling. Where the memory of the stages' hosts is known, only cuts that fit count. Explicit ranges
win over costs and memory and are only checked. Pure: no torch, no I/O.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stageline_api.errors import UserError
from stageline_api.failures import ExitCode
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.model_shapes import layer_size
from stageline_runtime.planning.devices import CPU_CORE, PRESETS, all_reduce_guess
from stageline_runtime.planning.memory import GroupMemory, HostRoom, mebibytes

SAMPLING_COST_PER_ENTRY = 64.0
"""Multiply-adds of a projection that take as long as one vocabulary entry of one row in sampling. Measured on one EPYC
core, [8, 49152] float32, where the bfloat16 head of 576 columns took 2.2 ms: torch's argmax took 0.21 ms. Greedy rows
take a tenth of it now, rows with a temperature several times as much."""

DECODE_ROWS = 8
"""Rows of the decode step that a cut is made for. Only mixtures depend on it: the more rows, the more experts run."""

_WEIGHT_BYTES = 2


class CutError(UserError):
    """The layers can't be divided as asked; the message names the stage, the value and the rule."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.BAD_CONFIG)


class NoRoomError(Exception):
    """No cut fits the memory of the stages; the message says where and how much is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCosts:
    """Relative compute per token of a model's parts, in multiply-adds, or their measured seconds."""

    layer: float
    embedding: float
    head: float


def estimate_costs(config: ModelConfig, experts: int = 1) -> CutCosts:
    """Estimate costs from parameter counts: each weight of a projection is one multiply-add per token.

    Of a mixture those experts count that a decode step of `DECODE_ROWS` rows is expected to read: such a step waits for
    its weights, whether one row or all have picked them. Where layers differ, their mean counts. Of `experts`
    ranks that they are divided among, each runs an even part of them.
    The embedding is a table look-up and counts one hidden vector; attention over the context is left out because it
    is the same for every layer and small beside the projections at serving lengths. The head includes sampling.
    """
    return CutCosts(
        layer=sum(_layer_cost(config, layer, experts) for layer in range(config.num_layers)) / config.num_layers,
        embedding=float(config.hidden_size),
        head=config.vocab_size * (config.hidden_size + SAMPLING_COST_PER_ENTRY),
    )


def engine_costs(config: ModelConfig, *, ranks: int = 1, experts: int = 1, on_devices: bool = False) -> CutCosts:
    """Costs of stages with `ranks` that share layers and head, or `experts` ranks that share only the experts; one of
    the two is 1. The embedding is whole on every rank.

    The engine divides layers before any rank has started, so no exchange latency is measured yet. It uses the guess for
    ranks of its kind, as the weights that a rank could read in that time. `stageline plan` cuts by the same costs, and
    shows a faster cut where a measured latency makes one.
    """
    costs = estimate_costs(config, experts)
    seconds = all_reduce_guess(DECODE_ROWS * config.hidden_size, on_devices=on_devices)
    device = PRESETS["a100-80gb"] if on_devices else CPU_CORE
    exchange = seconds * device.memory_bandwidth_bytes_per_second / _WEIGHT_BYTES
    return CutCosts(
        layer=costs.layer / ranks + _exchanges_a_layer(config, ranks, experts) * exchange,
        embedding=costs.embedding,
        head=costs.head / ranks,
    )


def _exchanges_a_layer(config: ModelConfig, ranks: int, experts: int) -> float:
    """Two in each layer that is shared, or in each mixture; a mean where layers differ."""
    if ranks > 1:
        return 2.0
    mixtures = sum(layer_size(config, layer).num_experts > 0 for layer in range(config.num_layers))
    return 2.0 * mixtures / config.num_layers if experts > 1 else 0.0


def _layer_cost(config: ModelConfig, layer: int, experts: int) -> float:
    """A token's own projections, and the experts that any row of the step picks."""
    size = layer_size(config, layer)
    return size.matrices + size.read_experts(DECODE_ROWS) / experts


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Cost of one stage: `fixed` plus `per_layer` for each of its layers."""

    fixed: float
    per_layer: float

    def of(self, num_layers: int) -> float:
        return self.fixed + num_layers * self.per_layer


def cut_layers(
    num_layers: int,
    stage_count: int,
    *,
    layer_cost: float,
    embedding_cost: float,
    head_cost: float,
    explicit: tuple[LayerRange, ...] | None = None,
    memory: GroupMemory | None = None,
) -> tuple[LayerRange, ...]:
    """Divide layers `0..num_layers-1` into `stage_count` contiguous ranges of at least one layer each.

    Raises:
        CutError: more stages than layers, or explicit ranges that don't cover the layers once and in order.
        NoRoomError: no cut fits `memory`; never raised for explicit ranges, which are not held against it.
    """
    _check_count(stage_count, num_layers)
    costs = CutCosts(layer=layer_cost, embedding=embedding_cost, head=head_cost)
    return cut_for_devices(num_layers, (costs,) * stage_count, explicit=explicit, memory=memory)


def cut_for_devices(
    num_layers: int,
    stage_costs: tuple[CutCosts, ...],
    *,
    explicit: tuple[LayerRange, ...] | None = None,
    memory: GroupMemory | None = None,
) -> tuple[LayerRange, ...]:
    """`cut_layers` for stages that differ: `stage_costs` are the parts' costs as each stage's own device has them."""
    stage_count = len(stage_costs)
    _check_count(stage_count, num_layers)
    if explicit is not None:
        _check_explicit(explicit, num_layers, stage_count)
        return explicit

    costs = tuple(_linear(each, stage, stage_count) for stage, each in enumerate(stage_costs))
    counts = partition(num_layers, costs, () if memory is None else memory.host_rooms())
    if counts is None:
        assert memory is not None, "without rooms every division fits"
        even = partition(num_layers, costs)
        assert even is not None
        raise NoRoomError(_no_room(memory, even))
    return _ranges(counts)


def _linear(costs: CutCosts, stage: int, stage_count: int) -> LinearCost:
    fixed = (stage == 0) * costs.embedding + (stage == stage_count - 1) * costs.head
    return LinearCost(fixed=fixed, per_layer=costs.layer)


def _no_room(memory: GroupMemory, counts: tuple[int, ...]) -> str:
    """Why nothing fits: where the cut that would be made without limits lacks memory, and by how much."""
    places = []
    for host in memory.shortages(memory.stages_by_count(counts)):
        names = ", ".join(str(stage.stage) for stage in host.stages)
        missing, usable = mebibytes(host.missing_bytes(memory.max_model_len)), mebibytes(host.usable_bytes)
        places.append(f"stage {names} lacks {missing} MiB, having {usable} MiB usable")
    return (
        f"no cut of the {sum(counts)} layers over {len(counts)} stages fits their memory: with layers divided evenly "
        f"by cost, {'; '.join(places)} (weights, the largest step and a cache of one sequence of maxModelLen "
        f"{memory.max_model_len} are counted); lower spec.engine.maxModelLen, use more stages or give them more memory"
    )


def _check_count(stage_count: int, num_layers: int) -> None:
    if stage_count < 1:
        raise CutError(f"spec.parallelism.pipeline is {stage_count}; it must be at least 1")
    if stage_count > num_layers:
        raise CutError(
            f"spec.parallelism.pipeline is {stage_count}, but the model has only {num_layers} layers; "
            "every stage needs at least one"
        )


def _ranges(counts: tuple[int, ...]) -> tuple[LayerRange, ...]:
    ranges: list[LayerRange] = []
    first = 0
    for count in counts:
        ranges.append(LayerRange(first=first, last=first + count - 1))
        first += count
    return tuple(ranges)


def _check_explicit(explicit: tuple[LayerRange, ...], num_layers: int, stage_count: int) -> None:
    if len(explicit) != stage_count:
        raise CutError(
            f"spec.stages gives layers for {len(explicit)} stages, but spec.parallelism.pipeline is {stage_count}"
        )
    for stage, layers in enumerate(explicit):
        if layers.last < layers.first:
            raise CutError(
                f"spec.stages[{stage}].layers is {_text(layers)}; the last layer must not be before the first"
            )
    if explicit[0].first != 0:
        raise CutError(f"spec.stages[0].layers is {_text(explicit[0])}; the first stage must start at layer 0")
    for stage, (before, after) in enumerate(pairwise(explicit), start=1):
        if after.first != before.last + 1:
            problem = "overlaps" if after.first <= before.last else "leaves a gap after"
            raise CutError(
                f"spec.stages[{stage}].layers is {_text(after)}, which {problem} spec.stages[{stage - 1}].layers "
                f"{_text(before)}; it must start at layer {before.last + 1}"
            )
    if explicit[-1].last != num_layers - 1:
        raise CutError(
            f"spec.stages[{stage_count - 1}].layers is {_text(explicit[-1])}; the last stage must end at layer "
            f"{num_layers - 1}, the model's last"
        )


def _text(layers: LayerRange) -> str:
    return f"{layers.first}-{layers.last}"


def partition(num_layers: int, costs: Sequence[LinearCost], rooms: Sequence[HostRoom] = ()) -> tuple[int, ...] | None:
    """Layers per stage, at least one each, in the order of `costs`; None when no division fits the rooms.

    A stage without a room has no limit. Among equals, layers go to the later stage. Needs as many layers as stages.

    Greedy: every stage starts with one layer, and each further layer goes to the stage that is cheapest with it and has
    capacity on its host. That is exact: the divisions that hosts can hold are the bases of a polymatroid (limits on
    disjoint sets of stages), where the greedy choice gives the lexicographically best one (Fujishige,
    "Lexicographically optimal base of a polymatroid with respect to a weight vector", Mathematics of Operations
    Research 5(2), 1980).
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
