"""What the engine's loop notes of traced requests, and what spans come of it, with the real core and scheduler."""

import asyncio
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from processes.core_answers import answer_of, submit
from stageline_api.engine_http import FinishReason, ModelInfo
from stageline_api.health import Phase
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest, FailEvent
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.engine.telemetry import tracing as engine_tracing
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.engine.telemetry.request_trace import (
    MAX_PREFILL_PLANS,
    MAX_STAGE_SPANS,
    RequestTrace,
    SpanData,
    attributes_at_end,
    moments,
    prefill_plans_of,
    spans_within,
)
from stageline_runtime.engine.telemetry.tracing import TracedRequests, open_tracing
from stageline_runtime.plan_bus.messages import RequestSampling, SampledRow, StepDone, StepPlan, StepTimes, ToStage

STAGES = 2
CLOCK_AHEAD = 5_000_000_000
"""Nanoseconds by which stage 1's clock is ahead of the engine's."""


@dataclass
class KeptTraces:
    """A sink that keeps the traces of requests whose id doesn't begin with `un`."""

    sent: list[RequestTrace] = field(default_factory=list)
    closed: bool = False

    def begin(self, request: AdmittedRequest, began_nanoseconds: int) -> object | None:
        assert began_nanoseconds > 0
        return None if request.request_id.startswith("un") else object()

    def send(self, trace: RequestTrace) -> None:
        self.sent.append(trace)

    def close(self) -> None:
        self.closed = True


class TwoStages:
    """Answers every plan with token 7, in the next turn of the loop; tells of the plans it is asked about."""

    def __init__(self, slots: int = 2, blocks: int | None = None, tells: bool = True) -> None:
        self.sink = KeptTraces()
        self.tracing = TracedRequests(self.sink, STAGES, lambda stage: CLOCK_AHEAD if stage else 0)
        self.plans: list[StepPlan] = []
        info = ModelInfo(served_name="x", max_model_len=64, vocab_size=99, eos_token_ids=())
        self.core = EngineCore(info, EngineMetrics("x"), self.tracing)
        ledger = SlotLedger(STAGES, STAGES * slots, 64, blocks, prefix_cache=False)
        self.scheduler = Scheduler(ledger, max_step_tokens=16, max_waiting=64)
        self.core.attach(self.scheduler, self.take)
        self.core.set_phase(Phase.READY)
        self._tells = tells
        self.decoding = asyncio.Event()
        """A row has been planned that is no prompt's."""

    def take(self, message: ToStage) -> None:
        if isinstance(message, StepPlan):
            self.plans.append(message)
            if any(not row.token_ids for row in message.rows):
                self.decoding.set()
            asyncio.get_running_loop().call_soon(self._finish, message)

    def _finish(self, plan: StepPlan) -> None:
        if plan.report_times and self._tells:
            for stage in range(STAGES):
                begin = 1_000 * plan.seq + (CLOCK_AHEAD if stage else 0)
                self.tracing.step_reported(stage, StepTimes(plan.seq, "prefill", begin, begin + 500, 400, 100))
        rows = tuple(SampledRow(row.slot, row.generation, 7) for row in plan.sampled_rows)
        self.core.step_done(StepDone(plan.seq, rows))

    async def answer(self, name: str, prompt_tokens: int = 3, new_tokens: int = 4, priority: int = 0) -> None:
        await answer_of(self.core, request(name, prompt_tokens, new_tokens, priority))


def request(name: str, prompt_tokens: int, new_tokens: int, priority: int = 0) -> AdmittedRequest:
    return AdmittedRequest(
        request_id=name,
        prompt_token_ids=tuple(range(prompt_tokens)),
        sampling=RequestSampling(temperature=0.0),
        max_new_tokens=new_tokens,
        stop_token_ids=frozenset(),
        priority=priority,
    )


def named(spans: list[SpanData]) -> dict[str, SpanData]:
    return {span.name: span for span in spans}


def test_only_plans_up_to_the_first_decode_of_a_traced_request_are_asked_about() -> None:
    async def run() -> TwoStages:
        stages = TwoStages()
        await stages.answer("untraced", 40)
        assert not any(plan.report_times for plan in stages.plans)
        stages.plans.clear()
        await stages.answer("traced", 40, new_tokens=9)
        return stages

    stages = asyncio.run(run())
    assert [plan.report_times for plan in stages.plans] == [True] * 4 + [False] * 7, (
        "three chunks, the first decode, the rest"
    )
    (trace,) = stages.sink.sent
    steps = sorted((step.times.seq - stages.plans[0].seq, step.stage) for step in trace.steps)
    assert steps == [(seq, stage) for seq in range(4) for stage in range(STAGES)]
    spans = named(list(spans_within(trace)))
    assert [len(spans[name].children) for name in ("engine.prefill", "engine.decode")] == [6, 2]
    begins = {step.begin_nanoseconds for step in spans["engine.decode"].children}
    assert len(begins) == 1, "the second stage's clock is set back by its offset"


def test_what_is_noted_is_forgotten_with_the_request() -> None:
    async def run() -> TwoStages:
        stages = TwoStages(slots=4)
        await asyncio.gather(*(stages.answer(f"traced {number}", 20 + number) for number in range(12)))
        for _ in stages.plans:
            await asyncio.sleep(0)
        return stages

    stages = asyncio.run(run())
    assert len(stages.sink.sent) == 12
    kept = {name: value for name, value in vars(stages.tracing).items() if isinstance(value, dict | list) and value}
    assert kept == {}


def test_an_ended_request_waits_for_stages_that_have_not_told_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long this process is held up between the end and the look at it.
    monkeypatch.setattr(engine_tracing, "SETTLE_NANOSECONDS", 10**15)

    async def run() -> TwoStages:
        stages = TwoStages(tells=False)
        await stages.answer("traced")
        stages.tracing.tick()
        assert stages.sink.sent == []
        stages.tracing.close()
        return stages

    stages = asyncio.run(run())
    (trace,) = stages.sink.sent
    assert stages.sink.closed
    assert not trace.steps
    assert list(named(list(spans_within(trace)))) == ["engine.queue", "engine.prefill", "engine.decode"]


def test_a_preempted_request_tells_of_every_slot_it_got() -> None:
    async def run() -> TwoStages:
        stages = TwoStages(slots=1, blocks=4)
        slow = [asyncio.create_task(stages.answer(f"slow {n}", 20, 30, priority=1)) for n in range(2)]
        await stages.decoding.wait()
        await stages.answer("urgent", 30, 4)
        await asyncio.gather(*slow)
        return stages

    stages = asyncio.run(run())
    counted = {
        trace.request.request_id: attributes_at_end(trace)["stageline.preemptions"] for trace in stages.sink.sent
    }
    assert counted["urgent"] == 0
    assert sum(map(int, map(str, counted.values()))) == stages.scheduler.num_preemptions > 0, counted
    for trace in stages.sink.sent:
        again = [moment.name for moment in moments(trace)].count("slot again after preemption")
        assert again == counted[trace.request.request_id]


def test_ends_are_told_apart() -> None:
    async def run() -> TwoStages:
        stages = TwoStages(slots=1)
        reading = [submit(stages.core, request(name, 3, 50)) for name in ("left", "stopped", "lost", "too", "queued")]
        await anext(reading[0])
        stages.core.abort("left")
        await anext(reading[1])
        stages.core.abort("stopped", FinishReason.STOP)
        await anext(reading[2])
        stages.core.fail_all("stage 1 is gone")
        lost = [[event async for event in stream][-1] for stream in reading[2:]]
        waited = [False, False, True]
        assert lost == [FailEvent("stage 1 is gone", was_waiting=each) for each in waited], "two of them in slots"
        for _ in stages.plans:
            await asyncio.sleep(0)
        stages.tracing.close()
        return stages

    sent = {trace.request.request_id: trace for trace in asyncio.run(run()).sink.sent}
    ends = {name: attributes_at_end(trace).get("error.type", "") for name, trace in sent.items()}
    assert ends == {"left": "aborted", "stopped": "", "lost": "group_lost", "too": "group_lost", "queued": "group_lost"}
    assert attributes_at_end(sent["stopped"])["gen_ai.response.finish_reasons"] == ("stop",)


def test_spans_of_stages_are_bounded_by_their_number() -> None:
    assert prefill_plans_of(1) == MAX_PREFILL_PLANS
    for stages in range(1, 100):
        assert 1 <= prefill_plans_of(stages) * stages <= max(MAX_STAGE_SPANS, stages)


def contract(directory: Path) -> PodContract:
    config = RuntimeConfig(
        model_name="m", namespace="n", served_name="s", source="file:///m", cache_dir=str(directory), stage_count=1
    )
    return PodContract(
        config=config, stage=0, stage_count=1, group=0, incarnation=1, pod_ip="127.0.0.1", master_addr="127.0.0.1",
        master_port=1, bus_token="t",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "sends"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
    ],
)
def test_the_standard_variables_decide(
    variables: dict[str, str],
    sends: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        tracing = open_tracing(contract(tmp_path), lambda _stage: 0)
    assert isinstance(tracing, TracedRequests if sends else type(None))
    if tracing is not None:
        tracing.close()
    assert ("'grpc' can't be used" in caplog.text) == ("grpc" in variables.values())


def test_an_engine_without_the_extra_says_what_to_install_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert open_tracing(contract(tmp_path), lambda _stage: 0) is None
    assert "stageline[tracing]" in caplog.text


def test_nothing_that_sends_spans_is_loaded_unasked() -> None:
    """FastAPI loads OpenTelemetry's interfaces by itself, where they are installed; they do nothing alone."""
    program = (
        "import sys; from stageline_runtime.engine import process\n"
        "from stageline_api.telemetry.span_export import is_collector_named\n"
        "assert not is_collector_named({})\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
