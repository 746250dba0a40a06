"""Cost of tracing in the engine: `python -m stageline_bench.costs.tracing_cost`.

Drives the engine's core with stages that answer at once, 8 requests at a time. Compares no tracing with tracing of
unsampled and of sampled requests, with all spans created and passed to an exporter that drops them. Prints the CPU time
of the event loop's thread per plan and per request, and that of the spans' thread per request; the medians of
interleaved repetitions. The last line is the cost of a stage's report on a plan.
"""

import asyncio
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stageline_api.engine_http import ModelInfo
from stageline_api.health import Phase
from stageline_api.telemetry.span_export import SpanExport
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest, TokenEvent
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.engine.telemetry.span_sender import OtelSpanSender
from stageline_runtime.engine.telemetry.tracing import TracedRequests
from stageline_runtime.plan_bus.bus import encode_frame
from stageline_runtime.plan_bus.messages import RequestSampling, SampledRow, StepDone, StepPlan, StepTimes, ToStage
from stageline_runtime.stage.telemetry.state_clock import BusyKind, StepRecord, WaitReason

STAGES, AT_ONCE, REQUESTS, TOKENS, REPETITIONS = 2, 8, 64, 100, 9
STEP_SECONDS = 0.008
"""A decode of 8 rows on one of two stages of SmolLM2-135M, one core each (docs/dev/benchmarks.md)."""


class EncodingExporter(SpanExporter):
    """Encodes spans without sending them, and measures its CPU time."""

    def __init__(self) -> None:
        self.spans = 0
        self.cpu_nanoseconds = 0

    def export(self, spans: Any) -> SpanExportResult:
        """Encode and drop."""
        begin = time.thread_time_ns()
        encode_spans(spans).SerializePartialToString()
        self.spans += len(spans)
        self.cpu_nanoseconds += time.thread_time_ns() - begin
        return SpanExportResult.SUCCESS


class EncodedOnly(SpanExport):
    """A span export without a destination."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=100_000))
        self._propagator = TraceContextTextMapPropagator()
        self._kinds, self._under = SpanKind, set_span_in_context
        self._tracer = self._provider.get_tracer("stageline")


class TimedSender(OtelSpanSender):
    """Measures the CPU time of its thread."""

    cpu_nanoseconds = 0

    def _run(self) -> None:
        super()._run()
        self.cpu_nanoseconds = time.thread_time_ns()


class InstantStages:
    """Answer each plan in the next turn of the loop, and report on it on request."""

    def __init__(self, tracing: TracedRequests | None) -> None:
        self.plans = 0
        self.tracing = tracing
        info = ModelInfo(served_name="model", max_model_len=1024, vocab_size=99, eos_token_ids=())
        self.core = EngineCore(info, EngineMetrics("model"), tracing)
        ledger = SlotLedger(STAGES, AT_ONCE // STAGES, 1024, None, prefix_cache=False)
        self.core.attach(Scheduler(ledger, max_step_tokens=512, max_waiting=REQUESTS), self.take)
        self.core.set_phase(Phase.READY)

    def take(self, message: ToStage) -> None:
        """Process a message, usually a plan."""
        if isinstance(message, StepPlan):
            self.plans += 1
            asyncio.get_running_loop().call_soon(self._finish, message)

    def _finish(self, plan: StepPlan) -> None:
        if self.tracing is not None and plan.report_times:
            for stage in range(STAGES):
                self.tracing.step_reported(stage, StepTimes(plan.seq, "decode", 1, 2, 1, 0))
        self.core.step_done(StepDone(plan.seq, tuple(SampledRow(r.slot, r.generation, 7) for r in plan.sampled_rows)))


async def load(stages: InstantStages, flags: str) -> float:
    """Run all requests; returns nanoseconds of this thread's CPU time."""

    async def answer(number: int) -> None:
        request = AdmittedRequest(
            request_id=f"request-{number}",
            prompt_token_ids=tuple(range(64)),
            sampling=RequestSampling(temperature=0.0),
            max_new_tokens=TOKENS,
            stop_token_ids=frozenset(),
            traceparent=f"00-{number + 1:032x}-00f067aa0ba902b7-{flags}",
            began_nanoseconds=time.perf_counter_ns(),
        )
        ended = asyncio.Event()
        stages.core.submit(request, lambda event: None if isinstance(event, TokenEvent) else ended.set())
        await ended.wait()

    begin = time.thread_time_ns()
    await asyncio.gather(*map(answer, range(REQUESTS)))
    return float(time.thread_time_ns() - begin)


def record() -> StepRecord:
    """A decode step of the last of two stages."""
    moment = iter(range(1000, 7000, 1000))
    states: tuple[tuple[Any, str], ...] = (
        (WaitReason.HOST, ""),
        (WaitReason.RECV, "receive hidden"),
        (BusyKind.DECODE, "forward"),
        (WaitReason.HOST, "send feedback"),
    )
    marks = tuple((state, operation, next(moment)) for state, operation in states)
    return StepRecord(5, 0, BusyKind.DECODE, 8, 8, 3, marks, next(moment))


def cpu(action: Callable[[], object], times: int = 5000) -> float:
    """Nanoseconds of this thread per call."""
    begin = time.thread_time_ns()
    for _ in range(times):
        action()
    return (time.thread_time_ns() - begin) / times


def main() -> None:
    """Measure and print."""
    loops: dict[str, list[float]] = {"off": [], "not sampled": [], "sampled": []}
    threads, encoding, plans = [], [], 0
    for _ in range(REPETITIONS):
        for name in loops:
            exporter = EncodingExporter()
            sender = TimedSender(EncodedOnly(exporter), "model")
            tracing = None if name == "off" else TracedRequests(sender, STAGES, lambda _stage: 0)
            stages = InstantStages(tracing)
            loops[name].append(asyncio.run(load(stages, "01" if name == "sampled" else "00")))
            (sender if tracing is None else tracing).close()
            plans = stages.plans
            if name == "sampled":
                threads.append(sender.cpu_nanoseconds / REQUESTS)
                encoding.append(exporter.cpu_nanoseconds / REQUESTS)
    off = median(loops["off"])
    print(f"off:         {off / plans:8.0f} ns a plan, all that the loop does for {REQUESTS} requests in {plans} plans")  # noqa: T201
    for name in ("not sampled", "sampled"):
        added = median(loops[name]) - off
        share = added / plans / 1e9 / STEP_SECONDS
        print(  # noqa: T201
            f"{name + ':':12} {added / plans:+8.0f} ns a plan, {added / REQUESTS:+8.0f} ns a request on the loop: "
            f"{share:.3%} of steps of {STEP_SECONDS * 1e3:g} ms"
        )
    print(f"the spans' threads: {median(threads):8.0f} ns a request to make them, {median(encoding):8.0f} to encode")  # noqa: T201
    told = record()
    print(f"a stage, to tell of a plan: {cpu(lambda: encode_frame(told.times())):6.0f} ns, and one send")  # noqa: T201


if __name__ == "__main__":
    main()
