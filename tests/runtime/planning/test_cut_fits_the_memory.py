"""Where the hosts' memory is known, the cut is the best of those that fit, and the engine's cache sizing accepts it."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.planning_models import llama_70b_class, small_llama, stage_cost, weight_bytes
from stageline_api.runtime_config import LayerRange
from stageline_runtime.engine.scheduling.cache_sizing import MemoryShortageError, size_cache
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.planning.cut import (
    CutCosts,
    NoRoomError,
    cut_for_devices,
    cut_layers,
    estimate_costs,
)
from stageline_runtime.planning.memory import USABLE_SHARE, GroupMemory, LargestStep, StageRoom, link_ring_bytes

GIBIBYTE = 1 << 30
STEP = LargestStep(tokens=3, rows=2)

costs_of_parts = st.builds(CutCosts, layer=st.floats(0.01, 100), embedding=st.floats(0, 300), head=st.floats(0, 1000))


def memory_of(config: ModelConfig, hosts: str, available_bytes: list[int], max_model_len: int = 16) -> GroupMemory:
    rooms = tuple(StageRoom(host=host, available_bytes=free) for host, free in zip(hosts, available_bytes, strict=True))
    return GroupMemory(config=config, rooms=rooms, max_model_len=max_model_len, largest_step=STEP, element_bytes=4)


def all_cuts(num_layers: int, stage_count: int) -> list[tuple[LayerRange, ...]]:
    return [
        tuple(LayerRange(first=a, last=b - 1) for a, b in pairwise((0, *borders, num_layers)))
        for borders in combinations(range(1, num_layers), stage_count - 1)
    ]


def can_be_served(cut: tuple[LayerRange, ...], memory: GroupMemory) -> bool:
    """Whether the engine's own cache sizing finds room for one sequence."""
    try:
        size_cache(memory.stages_of(cut), max_num_seqs=1, max_model_len=memory.max_model_len)
    except MemoryShortageError:
        return False
    return True


def descending_costs(cut: tuple[LayerRange, ...], num_layers: int, costs: tuple[CutCosts, ...]) -> list[float]:
    return sorted((stage_cost(one, num_layers, each) for one, each in zip(cut, costs, strict=True)), reverse=True)


@given(data=st.data(), num_layers=st.integers(1, 9))
def test_no_cut_that_fits_is_better(data: st.DataObject, num_layers: int) -> None:
    """Against every cut there is, with stages spread over shared hosts at will and devices of any speed."""
    stage_count = data.draw(st.integers(1, num_layers))
    config = small_llama(num_layers)
    hosts = data.draw(st.text("abc", min_size=stage_count, max_size=stage_count), label="hosts")
    whole = weight_bytes(config, LayerRange(first=0, last=num_layers - 1), is_first=True, is_last=True, element_bytes=4)
    sizes = st.integers(0, 3 * whole)
    free = data.draw(st.lists(sizes, min_size=stage_count, max_size=stage_count), label="available")
    costs = tuple(data.draw(st.lists(costs_of_parts, min_size=stage_count, max_size=stage_count), label="costs"))
    memory = memory_of(config, hosts, free)
    fitting = [cut for cut in all_cuts(num_layers, stage_count) if can_be_served(cut, memory)]
    if not fitting:
        with pytest.raises(NoRoomError, match=r"stage \d.* lacks \d+ MiB"):
            cut_for_devices(num_layers, costs, memory=memory)
        return
    chosen = cut_for_devices(num_layers, costs, memory=memory)
    assert chosen in fitting
    best = min(descending_costs(cut, num_layers, costs) for cut in fitting)
    assert descending_costs(chosen, num_layers, costs) == pytest.approx(best)


@given(data=st.data(), num_layers=st.integers(1, 130))
def test_a_cut_within_memory_covers_every_layer_once_in_order(data: st.DataObject, num_layers: int) -> None:
    stage_count = data.draw(st.integers(1, min(num_layers, 12)))
    config = small_llama(num_layers)
    hosts = data.draw(st.text("abcdef", min_size=stage_count, max_size=stage_count))
    free = data.draw(st.lists(st.integers(10**6, 10**8), min_size=stage_count, max_size=stage_count))
    costs = estimate_costs(config)
    try:
        cut = cut_layers(
            num_layers,
            stage_count,
            layer_cost=costs.layer,
            embedding_cost=costs.embedding,
            head_cost=costs.head,
            memory=memory_of(config, hosts, free),
        )
    except NoRoomError:
        return
    assert len(cut) == stage_count
    assert [layer for one in cut for layer in range(one.first, one.last + 1)] == list(range(num_layers))


@pytest.mark.parametrize(
    ("hosts", "gibibytes", "counts"),
    [
        ("abcdefgh", [80] * 8, [10, 10, 10, 10, 10, 10, 11, 9]),
        ("abcdefgh", [80] * 6 + [18, 80], [10, 10, 10, 10, 10, 11, 10, 9]),
        ("abcdefgh", [80, 80, 80, 10, 80, 80, 80, 80], [11, 11, 11, 5, 11, 11, 11, 9]),
        ("aabbccdd", [34, 34] + [96] * 6, [9, 9, 10, 10, 11, 11, 11, 9]),
        ("abababab", [66] * 8, None),
    ],
    ids=["room-for-all", "one-layer-less", "a-small-device", "two-stages-share-a-host", "no-room"],
)
def test_cuts_of_a_70b_class_model(hosts: str, gibibytes: list[int], counts: list[int] | None) -> None:
    config = llama_70b_class()
    costs = estimate_costs(config)
    rooms = tuple(
        StageRoom(host=host, available_bytes=size * GIBIBYTE, is_device=True)
        for host, size in zip(hosts, gibibytes, strict=True)
    )
    step = LargestStep(tokens=2048, rows=64)
    memory = GroupMemory(config=config, rooms=rooms, max_model_len=8192, largest_step=step, element_bytes=2)

    def cut() -> list[int]:
        ranges = cut_layers(
            80, 8, layer_cost=costs.layer, embedding_cost=costs.embedding, head_cost=costs.head, memory=memory
        )
        return [one.count for one in ranges]

    if counts is not None:
        assert cut() == counts
        return
    with pytest.raises(NoRoomError) as refusal:
        cut()
    assert "no cut of the 80 layers over 8 stages fits" in str(refusal.value)
    assert "stage 0, 2, 4, 6 lacks " in str(refusal.value)
    assert "having 65557 MiB usable" in str(refusal.value)


@pytest.mark.parametrize(
    ("is_first", "is_last", "expected"),
    [(True, True, 0), (False, False, 2 * GIBIBYTE), (True, False, GIBIBYTE + 4_096), (False, True, GIBIBYTE + 4_096)],
    ids=["alone", "middle", "first", "last"],
)
def test_rings_of_links_are_counted(is_first: bool, is_last: bool, expected: int) -> None:
    """16,384 tokens of 8,192 bfloat16 numbers: four buffers of 256 MiB each way, eight of 64 rows of feedback."""
    assert link_ring_bytes(16_384 * 8_192 * 2, 64, is_first=is_first, is_last=is_last) == expected


def test_a_device_has_rings_beside_its_step_and_a_host_has_none() -> None:
    config = small_llama(4)
    on_host = memory_of(config, "abc", [GIBIBYTE] * 3)
    on_device = replace(on_host, rooms=tuple(replace(room, is_device=True) for room in on_host.rooms))
    both = zip(on_device.stages_by_count([1] * 3), on_host.stages_by_count([1] * 3), strict=True)
    rings = [device.step_bytes - host.step_bytes for device, host in both]
    hidden, rows = STEP.tokens * config.hidden_size * 4, STEP.rows * 8
    assert rings == [4 * hidden + 8 * rows, 8 * hidden, 4 * hidden + 8 * rows]


def test_explicit_ranges_win_over_memory() -> None:
    """The engine refuses them later, with the shortage of that stage named; the cut never moves what a person wrote."""
    explicit = (LayerRange(first=0, last=0), LayerRange(first=1, last=7))
    memory = memory_of(small_llama(8), "ab", [0, 0])
    chosen = cut_layers(8, 2, layer_cost=1.0, embedding_cost=0.0, head_cost=0.0, explicit=explicit, memory=memory)
    assert chosen == explicit


def test_what_each_host_lacks_is_exact_to_the_byte() -> None:
    config = small_llama(4)
    memory = memory_of(config, "ab", [0, 0])
    stages = memory.stages_by_count((2, 2))
    needed = stages[0].needed_bytes(16)
    assert [host.missing_bytes(16) for host in memory.shortages(stages)] == [needed, stages[1].needed_bytes(16)]
    nearly = -(-(needed - 1) * 10 // 9)
    one_short = memory_of(config, "ab", [nearly, 10**9])
    (short,) = one_short.shortages(one_short.stages_by_count((2, 2)))
    assert [stage.stage for stage in short.stages] == [0]
    assert short.missing_bytes(16) == needed - int(nearly * USABLE_SHARE) > 0
