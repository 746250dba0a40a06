"""A plan's graph mode follows from the group's setting and the plan's rows alone, and crosses the bus with the plan."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.models.protocol import CaptureReport, CaptureSizes
from stageline_runtime.plan_bus.bus import encode_frame
from stageline_runtime.plan_bus.messages import GraphMode, PlanRow, RequestSampling, SampledRow, StepPlan, ToStage
from stageline_runtime.plan_bus.step_plan import decode_sizes, padded_size, plan_graph_mode
from stageline_runtime.stage.capturing import capture


def row(slot: int, num_tokens: int) -> PlanRow:
    return PlanRow(slot, 1, 0, num_tokens, (), need_sample=True)


@given(st.sampled_from(GraphMode), st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_whole_layers_only_for_single_token_rows_and_never_more_than_was_captured(
    graphs: GraphMode, sizes: list[int]
) -> None:
    mode = plan_graph_mode(graphs, [row(slot, size) for slot, size in enumerate(sizes)], dummy=False)
    expected = GraphMode.PIECEWISE if graphs is GraphMode.FULL and max(sizes) > 1 else graphs
    assert mode is expected


@pytest.mark.parametrize("graphs", GraphMode)
def test_a_warm_up_runs_what_was_captured_and_a_heartbeat_nothing(graphs: GraphMode) -> None:
    assert plan_graph_mode(graphs, (), dummy=True) is graphs
    assert plan_graph_mode(graphs, (), dummy=False) is GraphMode.OFF


@given(st.integers(1, 70), st.data())
def test_a_capture_provides_for_every_size_that_decode_plans_have(slots: int, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, slots))
    assert padded_size(num_rows) in decode_sizes(slots)


def test_the_scheduler_names_the_mode_and_it_survives_the_bus() -> None:
    scheduler = Scheduler(SlotLedger(1, 2, 16), max_step_tokens=8, max_waiting=4, graphs=GraphMode.FULL)
    sampling = RequestSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0)
    scheduler.add(
        Request(request_id="a", prompt=(5, 6, 7), sampling=sampling, max_new_tokens=3, stop_token_ids=frozenset())
    )
    prefill = scheduler.schedule()
    assert prefill is not None
    scheduler.complete(prefill.seq, [SampledRow(prefill.rows[0].slot, prefill.rows[0].generation, 9)])
    decode = scheduler.schedule()
    assert decode is not None
    assert (prefill.graph_mode, decode.graph_mode) == (GraphMode.PIECEWISE, GraphMode.FULL)
    assert scheduler.heartbeat().graph_mode is GraphMode.OFF
    for plan in (prefill, decode):
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=ToStage)
        assert isinstance(read, StepPlan), encode_frame(plan)
        assert read == plan


@pytest.mark.parametrize(
    ("slots", "max_step_tokens", "largest_chunks", "largest_decode"),
    [(16, 512, 256, 16), (256, 8192, 256, 256), (4, 100, 104, 4), (600, 1100, 256, 600), (1, 1, 1, 1)],
)
def test_steps_with_chunks_are_captured_up_to_256_tokens(
    slots: int, max_step_tokens: int, largest_chunks: int, largest_decode: int
) -> None:
    noted: list[CaptureSizes] = []

    def capture_graphs(_graphs: GraphMode, sizes: CaptureSizes, _progress: object) -> CaptureReport:
        noted.append(sizes)
        return CaptureReport(graphs=1, seconds=0.0, memory_bytes=0)

    model: Any = SimpleNamespace(capture_graphs=capture_graphs)
    given: Any = SimpleNamespace(
        graphs=GraphMode.FULL, num_cohorts=1, num_slots=slots, max_step_tokens=max_step_tokens, memory_bytes=0
    )
    capture(model, given, given, given)
    assert (max(noted[0].step), max(noted[0].decode)) == (largest_chunks, largest_decode)
