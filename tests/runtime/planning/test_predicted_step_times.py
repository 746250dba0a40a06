"""Predictions are the formulas of their docstrings: exact numbers for devices whose figures make them easy."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.planning_models import llama_70b_class, small_llama
from stageline_api.runtime_config import LayerRange
from stageline_runtime.planning.devices import ComputeRate, Device, Hardware, Link, hardware_from_preset
from stageline_runtime.planning.group_plan import plan_group
from stageline_runtime.planning.predict import Prediction, Workload, predict, step_seconds

UNIT_DEVICE = Device(
    name="unit",
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_second=1.0,
    flops_per_second=ComputeRate(float32=1e30, bfloat16=1e30),
    step_overhead_seconds=0.0,
)
"""Takes one second for each byte it reads."""
COUNTING_DEVICE = replace(
    UNIT_DEVICE, memory_bandwidth_bytes_per_second=1e30, flops_per_second=ComputeRate(float32=1.0, bfloat16=2.0)
)
"""Takes one second for each float32 operation."""
NO_LINK = Link(bandwidth_bytes_per_second=1e30, latency_seconds=0.0)

LAYER_PARAMETERS = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
"""Of `small_llama`: query and output, key and value, feed-forward, norms."""
LAYERS_OF_STEP = 8 * (4 * (2 * 64 + 3 * 128) + 4 * 64)
"""Eight tokens: the residual stream twice, gate, up and their product; a norm's float32."""
LOGITS_OF_STEP = 8 * 1000 * 40
"""Of eight rows at most; more than the layers took, which are done by then."""


def workload(**changes: object) -> Workload:
    usual = Workload(dtype="float32", max_model_len=64, num_sequences=4, context_tokens=10, max_step_tokens=8)
    return replace(usual, **changes)  # type: ignore[arg-type]


def ranges(*counts: int) -> tuple[LayerRange, ...]:
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(LayerRange(first=a, last=a + count - 1) for a, count in zip(starts, counts, strict=True))


@pytest.mark.parametrize(
    ("is_first", "is_last", "more_bytes"),
    [
        (False, False, 0),
        (True, False, 2 * 64 * 4),
        (False, True, 4 * (1000 * 64 + 64) + 2 * 2 * 1000 * 4),
    ],
    ids=["middle", "first-reads-its-rows-of-the-embedding", "last-reads-head-and-logits"],
)
def test_a_memory_bound_step_takes_its_bytes_over_the_bandwidth(is_first: bool, is_last: bool, more_bytes: int) -> None:
    keys_and_values = 2 * 10 * (2 * 3 * 2 * 16 * 4)
    expected = 4 * 3 * LAYER_PARAMETERS + keys_and_values + more_bytes
    seconds = step_seconds(
        small_llama(3),
        LayerRange(first=0, last=2),
        UNIT_DEVICE,
        workload(),
        2,
        is_first=is_first,
        is_last=is_last,
    )
    assert seconds == expected


@pytest.mark.parametrize(("dtype", "rate"), [("float32", 1.0), ("bfloat16", 2.0)])
def test_a_compute_bound_step_takes_its_operations_over_the_rate(dtype: str, rate: float) -> None:
    matrices = 3 * (LAYER_PARAMETERS - 2 * 64) + 1000 * 64
    attention = 4 * 10 * 4 * 16 * 3
    device = replace(COUNTING_DEVICE, step_overhead_seconds=0.5)
    layers = LayerRange(first=0, last=2)
    seconds = step_seconds(small_llama(3), layers, device, workload(dtype=dtype), 5, is_first=False, is_last=True)
    assert seconds == 5 * (2 * matrices + attention) / rate + 0.5


def test_a_slow_link_makes_the_token_loop_the_bound() -> None:
    """Equal stages of t seconds and a loop of L: the bubble is L / (P t + L)."""
    link = Link(bandwidth_bytes_per_second=1e30, latency_seconds=1000.0)
    device = replace(
        COUNTING_DEVICE, step_overhead_seconds=10.0, flops_per_second=ComputeRate(float32=1e30, bfloat16=1)
    )
    hardware = Hardware(devices=(device,) * 4, link=link)
    found = predict(small_llama(4), ranges(1, 1, 1, 1), hardware, workload(num_sequences=8))
    assert found.loop_seconds == 4000.0
    assert found.round_seconds == pytest.approx(4 * 10 + 4000)
    assert found.bubble == found.loop_bubble == pytest.approx(4000 / 4040)
    assert found.imbalance_bubble == pytest.approx(0, abs=1e-9)
    assert found.tokens_per_second == pytest.approx(8 / 4040)


def test_an_uneven_cut_makes_the_slowest_stage_the_bound() -> None:
    """Without a loop the bubble is 1 - mean / max, and the slowest stage has none."""
    hardware = Hardware(devices=(UNIT_DEVICE,) * 2, link=NO_LINK)
    found = predict(small_llama(8), ranges(6, 2), hardware, workload())
    first, last = (stage.step_seconds for stage in found.stages)
    assert found.bubble == found.imbalance_bubble == pytest.approx(1 - (first + last) / 2 / max(first, last))
    assert [stage.bubble for stage in found.stages] == pytest.approx([0.0, 1 - last / first])
    assert found.round_seconds == 2 * first
    assert found.tokens_per_second == 4 / (2 * first)


def test_one_stage_alone_has_no_bubble() -> None:
    found = predict(small_llama(3), ranges(3), Hardware(devices=(UNIT_DEVICE,), link=NO_LINK), workload())
    assert (found.bubble, found.loop_seconds, found.rows_per_step) == (0.0, 0.0, 4)


@given(
    rows=st.integers(1, 64),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    latency=st.floats(0, 1e5),
    speeds=st.data(),
)
def test_the_parts_of_a_prediction_agree(rows: int, counts: list[int], latency: float, speeds: st.DataObject) -> None:
    devices = tuple(
        replace(UNIT_DEVICE, memory_bandwidth_bytes_per_second=speeds.draw(st.floats(1, 1000))) for _ in counts
    )
    hardware = Hardware(devices=devices, link=Link(bandwidth_bytes_per_second=1e30, latency_seconds=latency))
    found = predict(small_llama(sum(counts)), ranges(*counts), hardware, workload(num_sequences=rows))
    assert found.admitted_sequences == rows
    assert 0 <= found.bubble < 1
    assert all(0 <= stage.bubble < 1 for stage in found.stages)
    assert found.tokens_per_second == rows / found.round_seconds
    if rows >= len(counts):
        assert found.bubble >= max(found.imbalance_bubble, found.loop_bubble) - 1e-9


def capacity_of(memory_bytes: int, host: str | None = None) -> Prediction:
    device = replace(UNIT_DEVICE, memory_bytes=memory_bytes, host=host)
    hardware = Hardware(devices=(device,) * 2, link=NO_LINK)
    return predict(small_llama(2), ranges(1, 1), hardware, workload(num_sequences=100))


def test_capacity_is_what_weights_and_largest_step_leave_of_nine_tenths() -> None:
    first = 4 * (LAYER_PARAMETERS + 1000 * 64)
    last = first + 4 * 64
    per_token = 2 * 2 * 16 * 4
    found = capacity_of(1_000_000)
    assert [stage.weight_bytes for stage in found.stages] == [first, last]
    assert [stage.kv_capacity_tokens for stage in found.stages] == [
        (900_000 - first - LAYERS_OF_STEP) // per_token,
        (900_000 - last - LOGITS_OF_STEP) // per_token,
    ]
    assert found.admitted_sequences == (900_000 - last - LOGITS_OF_STEP) // per_token // 10
    shared = capacity_of(2_000_000, host="one")
    left = 1_800_000 - first - last - LAYERS_OF_STEP - LOGITS_OF_STEP
    assert {stage.kv_capacity_tokens for stage in shared.stages} == {left // (2 * per_token)}


def test_what_a_device_has_is_the_stages_alone_but_for_links_and_graphs() -> None:
    of_a_machine, of_a_device = (
        predict(
            small_llama(2),
            ranges(1, 1),
            Hardware(devices=(replace(UNIT_DEVICE, memory_bytes=1_000_000),) * 2, link=NO_LINK),
            workload(on_devices=on_devices),
        ).stages[0]
        for on_devices in (False, True)
    )
    assert (of_a_machine.usable_bytes, of_a_device.usable_bytes) == (900_000, 970_000)


def test_what_is_missing_is_named_and_nothing_is_promised() -> None:
    found = capacity_of(300_000)
    smallest_cache = 2 * 16 * 4 * 64 * 2
    assert [stage.missing_bytes for stage in found.stages] == [
        stage.weight_bytes + step + smallest_cache - 270_000
        for stage, step in zip(found.stages, (LAYERS_OF_STEP, LOGITS_OF_STEP), strict=True)
    ]
    assert (found.admitted_sequences, found.tokens_per_second) == (0, None)
    assert found.rows_per_step == 50


def test_a_faster_cut_for_unequal_devices_is_shown_but_never_made() -> None:
    slow = replace(UNIT_DEVICE, memory_bandwidth_bytes_per_second=1.0)
    fast = replace(UNIT_DEVICE, memory_bandwidth_bytes_per_second=10.0)
    plan = plan_group(small_llama(22), Hardware(devices=(slow, fast), link=NO_LINK), workload(), None)
    assert [one.count for one in plan.cut] == [13, 9]
    assert plan.faster_cut is not None
    assert [one.count for one in plan.faster_cut] == [2, 20]
    assert plan.faster_tokens_per_second is not None
    assert plan.prediction.tokens_per_second is not None
    assert plan.faster_tokens_per_second > 5 * plan.prediction.tokens_per_second


def test_equal_devices_get_no_other_advice_than_the_engines_cut() -> None:
    asked = Workload(dtype="bfloat16", max_model_len=4096, num_sequences=64, context_tokens=1024)
    assert plan_group(llama_70b_class(), hardware_from_preset("h100-80gb", 8), asked, None).faster_cut is None


def test_a_70b_class_model_is_planned_over_eight_l4() -> None:
    asked = Workload(dtype="bfloat16", max_model_len=4096, num_sequences=64, context_tokens=1024, on_devices=True)
    plan = plan_group(llama_70b_class(), hardware_from_preset("l4-24gb", 8), asked, None)
    assert [one.count for one in plan.cut] == [10, 10, 10, 10, 10, 10, 11, 9]
    assert sum(stage.weight_bytes for stage in plan.prediction.stages) == 2 * 70_553_706_496
    assert plan.prediction.admitted_sequences == 64
    one_layer = 2 * (8192 * (64 + 8 + 8 + 64) * 128 + 3 * 8192 * 28_672 + 2 * 8192)
    cache = 8 * 1024 * 4096
    expected = 10 * (one_layer + cache) / 300e9 + 0.0005
    assert plan.prediction.stages[1].step_seconds == pytest.approx(expected)
