"""Cuts a model's layers into contiguous stages so that the slowest stage is as fast as it can be.

A pipeline runs at the pace of its slowest stage, so the cut minimises the largest stage cost; among cuts that reach
that minimum it takes the most even one (least sum of squares). Stage 0 also pays for the embedding and the last stage
for the head. Explicit ranges win over costs and are only checked. Pure: no torch, no I/O.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from stageline_api.errors import UserError
from stageline_api.failures import ExitCode
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_config import ModelConfig

_ROUNDING = 1.0 + 1e-12


class CutError(UserError):
    """The layers can't be divided as asked; the message names the stage, the value and the rule."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.BAD_CONFIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCosts:
    """Relative compute per token of a model's parts, in multiply-adds."""

    layer: float
    embedding: float
    head: float


def estimate_costs(config: ModelConfig) -> CutCosts:
    """Estimate costs from parameter counts: each weight of a projection is one multiply-add per token.

    The embedding is a table look-up and counts one hidden vector; attention over the context is left out because it
    is the same for every layer and small beside the projections at serving lengths.
    """
    query_size = config.num_heads * config.head_dim
    key_value_size = 2 * config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * query_size + key_value_size)
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    return CutCosts(
        layer=float(attention + feed_forward),
        embedding=float(config.hidden_size),
        head=float(config.vocab_size * config.hidden_size),
    )


def cut_layers(
    num_layers: int,
    stage_count: int,
    *,
    layer_cost: float,
    embedding_cost: float,
    head_cost: float,
    explicit: tuple[LayerRange, ...] | None = None,
) -> tuple[LayerRange, ...]:
    """Divide layers `0..num_layers-1` into `stage_count` contiguous ranges of at least one layer each.

    Raises:
        CutError: more stages than layers, or explicit ranges that don't cover the layers once and in order.
    """
    if stage_count < 1:
        raise CutError(f"parallelism.pipeline is {stage_count}; it must be at least 1")
    if stage_count > num_layers:
        raise CutError(
            f"parallelism.pipeline is {stage_count}, but the model has only {num_layers} layers; "
            "every stage needs at least one"
        )
    if explicit is not None:
        _check_explicit(explicit, num_layers, stage_count)
        return explicit
    costs = CutCosts(layer=layer_cost, embedding=embedding_cost, head=head_cost)
    return _ranges(_most_even_counts(num_layers, stage_count, costs))


def stage_cost(layers: LayerRange, num_layers: int, costs: CutCosts) -> float:
    """Cost of the stage that holds `layers` of a model with `num_layers`."""
    ends = (costs.embedding if layers.first == 0 else 0.0) + (costs.head if layers.last == num_layers - 1 else 0.0)
    return layers.count * costs.layer + ends


def _most_even_counts(num_layers: int, stage_count: int, costs: CutCosts) -> tuple[int, ...]:
    """Layers per stage: least largest cost first, then least sum of squared costs, then fewer layers up front."""
    limit = _smallest_limit(num_layers, stage_count, costs) * _ROUNDING
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stage_count):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (squares, counts) in best.items():
            for count in range(1, num_layers - used - (stage_count - stage - 1) + 1):
                cost = _cost_of_count(count, stage, stage_count, costs)
                if cost > limit:
                    break
                candidate = (squares + cost * cost, (*counts, count))
                if used + count not in reached or candidate < reached[used + count]:
                    reached[used + count] = candidate
        best = reached
    return best[num_layers][1]


def _smallest_limit(num_layers: int, stage_count: int, costs: CutCosts) -> float:
    """Smallest possible largest stage cost. Row `stage` of the table maps layers used so far to it."""
    best = {0: 0.0}
    for stage in range(stage_count):
        reached: dict[int, float] = {}
        for used, largest in best.items():
            for count in range(1, num_layers - used - (stage_count - stage - 1) + 1):
                cost = max(largest, _cost_of_count(count, stage, stage_count, costs))
                reached[used + count] = min(cost, reached.get(used + count, math.inf))
        best = reached
    return best[num_layers]


def _cost_of_count(count: int, stage: int, stage_count: int, costs: CutCosts) -> float:
    ends = (costs.embedding if stage == 0 else 0.0) + (costs.head if stage == stage_count - 1 else 0.0)
    return count * costs.layer + ends


def _ranges(counts: tuple[int, ...]) -> tuple[LayerRange, ...]:
    ranges: list[LayerRange] = []
    first = 0
    for count in counts:
        ranges.append(LayerRange(first=first, last=first + count - 1))
        first += count
    return tuple(ranges)


def _check_explicit(explicit: tuple[LayerRange, ...], num_layers: int, stage_count: int) -> None:
    if len(explicit) != stage_count:
        raise CutError(f"stages gives layers for {len(explicit)} stages, but parallelism.pipeline is {stage_count}")
    for stage, layers in enumerate(explicit):
        if layers.last < layers.first:
            raise CutError(f"stages[{stage}].layers is {_text(layers)}; the last layer must not be before the first")
    if explicit[0].first != 0:
        raise CutError(f"stages[0].layers is {_text(explicit[0])}; the first stage must start at layer 0")
    for stage, (before, after) in enumerate(pairwise(explicit), start=1):
        if after.first != before.last + 1:
            problem = "overlaps" if after.first <= before.last else "leaves a gap after"
            raise CutError(
                f"stages[{stage}].layers is {_text(after)}, which {problem} stages[{stage - 1}].layers "
                f"{_text(before)}; it must start at layer {before.last + 1}"
            )
    if explicit[-1].last != num_layers - 1:
        raise CutError(
            f"stages[{stage_count - 1}].layers is {_text(explicit[-1])}; the last stage must end at layer "
            f"{num_layers - 1}, the model's last"
        )


def _text(layers: LayerRange) -> str:
    return f"{layers.first}-{layers.last}"
