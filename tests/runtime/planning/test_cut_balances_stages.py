"""The cut covers the layers once, in order, and no other cut has a cheaper slowest stage."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.planning_models import small_mixture, stage_cost
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import model_config_from_dict
from stageline_runtime.planning.cut import CutCosts, CutError, cut_layers, estimate_costs
from stageline_runtime.planning.devices import hardware_from_preset
from stageline_runtime.planning.predict import Workload, step_seconds

costs_of_parts = st.builds(CutCosts, layer=st.floats(0.01, 100), embedding=st.floats(0, 300), head=st.floats(0, 1000))


def cut(
    num_layers: int, stage_count: int, costs: CutCosts, explicit: tuple[LayerRange, ...] | None = None
) -> tuple[LayerRange, ...]:
    return cut_layers(
        num_layers,
        stage_count,
        layer_cost=costs.layer,
        embedding_cost=costs.embedding,
        head_cost=costs.head,
        explicit=explicit,
    )


def all_cuts(num_layers: int, stage_count: int) -> list[tuple[LayerRange, ...]]:
    cuts = []
    for borders in combinations(range(1, num_layers), stage_count - 1):
        ends = (0, *borders, num_layers)
        cuts.append(tuple(LayerRange(first=a, last=b - 1) for a, b in pairwise(ends)))
    return cuts


def slowest(ranges: tuple[LayerRange, ...], num_layers: int, costs: CutCosts) -> float:
    return max(stage_cost(layers, num_layers, costs) for layers in ranges)


@given(data=st.data(), num_layers=st.integers(1, 9), costs=costs_of_parts)
def test_cut_is_as_good_as_trying_all(data: st.DataObject, num_layers: int, costs: CutCosts) -> None:
    stage_count = data.draw(st.integers(1, num_layers))
    ranges = cut(num_layers, stage_count, costs)
    best = min(slowest(other, num_layers, costs) for other in all_cuts(num_layers, stage_count))
    assert slowest(ranges, num_layers, costs) == pytest.approx(best)


@given(data=st.data(), num_layers=st.integers(1, 130), costs=costs_of_parts)
def test_cut_covers_every_layer_once_in_order(data: st.DataObject, num_layers: int, costs: CutCosts) -> None:
    stage_count = data.draw(st.integers(1, min(num_layers, 8)))
    ranges = cut(num_layers, stage_count, costs)
    assert len(ranges) == stage_count
    assert [layer for one in ranges for layer in range(one.first, one.last + 1)] == list(range(num_layers))
    assert all(one.count >= 1 for one in ranges)


def test_equal_layers_are_spread_evenly_among_the_cheap_stages() -> None:
    """The head sets the pace; the layers before it are still not piled on one stage."""
    ranges = cut(7, 4, CutCosts(layer=1.0, embedding=0.0, head=10.0))
    assert [one.count for one in ranges] == [2, 2, 2, 1]


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    config = model_config_from_dict(
        {
            "model_type": "llama",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
        },
        {},
    )
    costs = estimate_costs(config)
    assert costs.layer == 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    assert [one.count for one in cut(30, 2, costs)] == [19, 11]


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_a_mixtures_slowest_stage_is_about_as_fast_as_with_any_other_cut(rows: int) -> None:
    """By the predicted step, which reads the experts that `rows` rows pick: more of them, and the head weighs less."""
    num_layers, stage_count = 16, 4
    config, hardware = small_mixture(num_layers), hardware_from_preset("h100-80gb", stage_count)
    workload = Workload(dtype="bfloat16", max_model_len=4096, num_sequences=stage_count * rows, context_tokens=1024)

    @cache
    def seconds(stage: int, count: int) -> float:
        layers = LayerRange(first=0, last=count - 1)
        ends = {"is_first": stage == 0, "is_last": stage == stage_count - 1}
        return step_seconds(config, layers, hardware.devices[stage], workload, rows, **ends)

    def slowest_seconds(counts: Sequence[int]) -> float:
        return max(seconds(stage, count) for stage, count in enumerate(counts))

    best = min(slowest_seconds([one.count for one in other]) for other in all_cuts(num_layers, stage_count))
    chosen = [one.count for one in cut(num_layers, stage_count, estimate_costs(config))]
    assert slowest_seconds(chosen) <= 1.05 * best, chosen


@pytest.mark.parametrize(
    ("ranges", "complaint"),
    [
        (((0, 3),), "spec.stages gives layers for 1 stages, but spec.parallelism.pipeline is 2"),
        (((1, 3), (4, 7)), "spec.stages[0].layers is 1-3; the first stage must start at layer 0"),
        (
            ((0, 3), (3, 7)),
            "spec.stages[1].layers is 3-7, which overlaps spec.stages[0].layers 0-3; it must start at layer 4",
        ),
        (((0, 3), (5, 7)), "spec.stages[1].layers is 5-7, which leaves a gap after spec.stages[0].layers 0-3"),
        (((0, 3), (4, 6)), "spec.stages[1].layers is 4-6; the last stage must end at layer 7"),
        (((0, 3), (4, 8)), "spec.stages[1].layers is 4-8; the last stage must end at layer 7"),
        (((0, 7), (8, 3)), "spec.stages[1].layers is 8-3; the last layer must not be before the first"),
    ],
)
def test_bad_explicit_ranges_are_refused_by_name(ranges: tuple[tuple[int, int], ...], complaint: str) -> None:
    explicit = tuple(LayerRange(first=first, last=last) for first, last in ranges)
    with pytest.raises(CutError) as refusal:
        cut(8, 2, CutCosts(layer=1.0, embedding=0.0, head=0.0), explicit)
    assert complaint in str(refusal.value)


def test_explicit_ranges_win_over_costs() -> None:
    explicit = (LayerRange(first=0, last=0), LayerRange(first=1, last=7))
    assert cut(8, 2, CutCosts(layer=1.0, embedding=0.0, head=50.0), explicit) == explicit


@pytest.mark.parametrize("stage_count", [0, -1, 9])
def test_impossible_stage_counts_are_refused(stage_count: int) -> None:
    with pytest.raises(CutError, match=f"spec.parallelism.pipeline is {stage_count}"):
        cut(8, stage_count, CutCosts(layer=1.0, embedding=0.0, head=0.0))
