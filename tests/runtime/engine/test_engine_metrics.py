"""The engine's series are those of the requests and plans that were made, by the definitions in their help texts."""

import asyncio
from collections.abc import Callable

import pytest

from stageline_api.engine_http import FinishReason, ModelInfo
from stageline_api.health import Phase
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest, EngineRefusal
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.engine.telemetry.metrics import GROUP_LOST, EngineMetrics, RequestMetrics
from stageline_runtime.plan_bus.messages import RequestSampling, SampledRow, StepDone, StepPlan, ToStage

Value = Callable[..., float | None]


def reader(registry: MetricRegistry) -> Value:
    """Reads one sample of model x, `stageline_` left out of its name."""

    def value(name: str, **labels: str) -> float | None:
        return registry.collectors.get_sample_value(f"stageline_{name}", {"model_name": "x", **labels})

    return value


def test_each_time_is_computed_from_its_definition() -> None:
    moments = iter([10.0, 10.5, 12.0, 13.0, 15.0])
    registry = MetricRegistry()
    metrics, value = RequestMetrics(registry, "x", lambda: next(moments)), reader(registry)
    times = metrics.arrived()
    metrics.scheduled(times, prompt_tokens=7)
    for _ in range(3):
        metrics.sampled(times)
    metrics.ended(times, FinishReason.STOP)
    assert value("request_queue_time_seconds_sum") == 0.5
    assert value("request_prefill_time_seconds_sum") == 1.5
    assert value("request_decode_time_seconds_sum") == 3.0
    assert value("request_inference_time_seconds_sum") == 4.5
    assert (value("request_prompt_tokens_sum"), value("request_generation_tokens_sum")) == (7, 3)
    assert (value("engine_prompt_tokens_total"), value("engine_generation_tokens_total")) == (7, 3)
    ends = {reason: value("request_success_total", finished_reason=reason) for reason in FinishReason}
    assert ends == {FinishReason.STOP: 1, FinishReason.LENGTH: 0, FinishReason.ABORT: 0}


def test_a_request_whose_sender_left_is_counted_and_not_timed() -> None:
    registry = MetricRegistry()
    metrics, value = RequestMetrics(registry, "x", lambda: 1.0), reader(registry)
    times = metrics.arrived()
    metrics.scheduled(times, prompt_tokens=1)
    metrics.sampled(times)
    metrics.ended(times, FinishReason.ABORT)
    metrics.sampled(None)  # a row that was under way
    metrics.failed(GROUP_LOST)
    assert value("request_success_total", finished_reason="abort") == 1
    assert value("request_decode_time_seconds_count") == 0
    assert value("engine_generation_tokens_total") == 2
    assert value("engine_request_failures_total", reason=GROUP_LOST) == 1


class OneStage:
    """A core whose stage samples 5 for every row, but only when `answers` says so."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics("x")
        self.core = EngineCore(
            ModelInfo(served_name="x", max_model_len=64, vocab_size=9, eos_token_ids=()), self.metrics
        )
        self.core.attach(Scheduler(SlotLedger(2, 4, 64), max_step_tokens=8, max_waiting=1), self._send)
        self.core.set_phase(Phase.READY)
        self.plans: list[StepPlan] = []
        self.value = reader(self.metrics.registry)

    def _send(self, message: ToStage) -> None:
        if isinstance(message, StepPlan):
            self.plans.append(message)

    def finish(self, plan: StepPlan) -> None:
        rows = tuple(SampledRow(row.slot, row.generation, 5) for row in plan.sampled_rows)
        self.core.step_done(StepDone(plan.seq, rows))

    def submit(self, name: str, prompt_tokens: int) -> None:
        self.core.submit(
            AdmittedRequest(
                request_id=name,
                prompt_token_ids=tuple(range(1, 1 + prompt_tokens)),
                sampling=RequestSampling(),
                max_new_tokens=1,
                stop_token_ids=frozenset(),
            ),
            lambda _event: None,
        )


def test_gauges_and_plans_are_those_of_this_moment() -> None:
    async def run() -> OneStage:
        stage = OneStage()
        stage.submit("a", 6)
        await asyncio.sleep(0)
        stage.submit("b", 1)
        await asyncio.sleep(0)
        stage.core.metrics_page()
        return stage

    stage = asyncio.run(run())
    value = stage.value
    assert [len(plan.rows) for plan in stage.plans] == [1, 1]
    assert (value("num_requests_running"), value("plans_in_flight")) == (2, 2)
    assert [value("cohort_requests", cohort=str(cohort)) for cohort in (0, 1)] == [1, 1]
    held, cached, free = (value("kv_blocks", state=state) for state in ("held", "cached", "free"))
    assert (held, cached, free) == (2, 0, 14), "4 slots of 64 tokens in blocks of 16"
    assert value("kv_cache_usage_ratio") == pytest.approx(2 / 16)
    assert (value("iteration_tokens_count"), value("iteration_tokens_sum")) == (2, 7)
    assert (value("cohort_rows_count"), value("cohort_rows_sum")) == (2, 2)
    assert value("engine_plans_total") == 2


def test_what_is_not_taken_is_counted_by_its_code() -> None:
    async def run() -> OneStage:
        stage = OneStage()
        assert stage.core.status().queue_room == 1
        stage.submit("a", 1)
        assert stage.core.status().queue_room == 0
        for name, code in (("a", "invalid_value"), ("b", "queue_full")):
            with pytest.raises(EngineRefusal) as refusal:
                stage.submit(name, 1)
            assert refusal.value.code == code
        await asyncio.sleep(0)
        stage.finish(stage.plans[0])
        stage.core.start_drain()
        with pytest.raises(EngineRefusal):
            stage.submit("c", 1)
        return stage

    value = asyncio.run(run()).value
    refused = {
        code: value("engine_refusals_total", reason=code) for code in ("invalid_value", "queue_full", "draining")
    }
    assert refused == {"invalid_value": 1, "queue_full": 1, "draining": 1}
    assert value("request_success_total", finished_reason="length") == 1


def test_who_waits_the_longest_is_the_first_without_a_row() -> None:
    moments = iter([10.0, 11.0, 12.0, 13.0, 15.0])
    registry = MetricRegistry()
    metrics, value = RequestMetrics(registry, "x", lambda: next(moments)), reader(registry)
    first, second = metrics.arrived(), metrics.arrived()
    metrics.scheduled(first, prompt_tokens=1)
    metrics.show_waiting(metrics.longest_wait_seconds([first, second]))
    assert value("oldest_waiting_request_seconds") == 2.0
    metrics.show_waiting(metrics.longest_wait_seconds([first]))
    assert value("oldest_waiting_request_seconds") == 0.0
