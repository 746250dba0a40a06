"""Records traced requests on the engine's event loop; the sender makes and sends the spans.

A request is recorded when it arrives, gets a slot and ends. Plans are inspected only while a traced request waits
for its first decode, and tokens never. Stages report a plan after they ran it, so an ended request is held until
they have.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from stageline_api.errors import UserError
from stageline_api.telemetry.span_export import SpanExport, is_collector_named
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.telemetry.metrics import RequestTimes
from stageline_runtime.engine.telemetry.request_trace import (
    ClockAnchor,
    Outcome,
    Place,
    RequestTrace,
    StageStep,
    prefill_plans_of,
)
from stageline_runtime.plan_bus.messages import StepPlan, StepTimes

logger = logging.getLogger(__name__)

SERVICE: Final = "stageline-engine"
SETTLE_NANOSECONDS: Final = 1_000_000_000
"""How long an ended request is held for stages that have not reported its steps."""
RequestAt = Callable[[int, int], str | None]
"""Id of the request that holds a slot in a generation."""


class SpanSink(Protocol):
    """Makes spans and sends them. Only `close` waits."""

    def begin(self, request: AdmittedRequest, began_nanoseconds: int) -> object | None:
        """The span of a request that began at this wall time; None where its trace isn't kept."""

    def send(self, trace: RequestTrace) -> None:
        """All spans of a request that has ended."""

    def close(self) -> None:
        """Send the queued spans; the wait is bounded."""


class TracedRequests:
    """The requests of one engine whose traces are kept."""

    def __init__(self, sink: SpanSink, stage_count: int, clock_offset: Callable[[int], int | None]) -> None:
        """`clock_offset` gives a stage's clock minus `time.perf_counter_ns` here, None while that isn't known."""
        self._sink = sink
        self._stage_count = stage_count
        self._clock_offset = clock_offset
        self._live: dict[str, RequestTrace] = {}
        self._watched: dict[tuple[int, int], RequestTrace] = {}
        """By slot and generation: requests with no first decode planned yet."""
        self._asked: dict[int, list[tuple[RequestTrace, bool]]] = {}
        """By plan that not every stage has reported: the traces with rows in it, and whether the rows are decodes."""
        self._reports: dict[int, int] = {}
        self._settling: list[RequestTrace] = []

    def submitted(self, request: AdmittedRequest, times: RequestTimes) -> RequestTrace | None:
        anchor = ClockAnchor(
            wall_nanoseconds=time.time_ns(),
            performance_nanoseconds=time.perf_counter_ns(),
            monotonic_seconds=time.monotonic(),
        )
        began = request.began_nanoseconds
        span = self._sink.begin(request, anchor.wall_nanoseconds if began is None else anchor.of_performance(began))
        if span is None:
            return None
        trace = RequestTrace(
            span=span, request=request, anchor=anchor, times=times, prefill_plans=prefill_plans_of(self._stage_count)
        )
        self._live[request.request_id] = trace
        return trace

    def planned(self, plan: StepPlan, request_at: RequestAt) -> StepPlan:
        """Record which requests got a slot; ask the stages for reports of a plan that concerns a traced request."""
        if plan.fills and self._live:
            self._note_places(plan, request_at)
        if not self._watched:
            return plan
        rows = [
            (trace, not row.is_chunk)
            for row in plan.rows
            if (trace := self._watched.get((row.slot, row.generation))) is not None and trace.wants(row)
        ]
        if not rows:
            return plan
        for trace, is_decode in rows:
            trace.awaited += self._stage_count
            if is_decode:
                self._unwatch(trace)
        self._asked[plan.seq] = rows
        return msgspec.structs.replace(plan, report_times=True)

    def step_reported(self, stage: int, times: StepTimes) -> None:
        """A stage has run a plan that it was asked about."""
        offset = self._clock_offset(stage)
        for trace, is_decode in self._asked.get(times.seq, ()):
            trace.awaited -= 1
            if offset is not None:
                trace.steps.append(StageStep(stage, offset, is_decode, times))
        reports = self._reports[times.seq] = self._reports.get(times.seq, 0) + 1
        if reports == self._stage_count:
            self._asked.pop(times.seq, None)
            del self._reports[times.seq]

    def ended(self, trace: RequestTrace, outcome: Outcome) -> None:
        """Pass the trace on, now or when its stages have reported all its steps."""
        trace.outcome, trace.ended_nanoseconds = outcome, time.perf_counter_ns()
        del self._live[trace.request.request_id]
        self._unwatch(trace)
        self._settling.append(trace)
        if not trace.awaited:
            self.tick()

    def tick(self) -> None:
        """Pass on traces that were held long enough; called now and then."""
        settled_before = time.perf_counter_ns() - SETTLE_NANOSECONDS
        still: list[RequestTrace] = []
        for trace in self._settling:
            if trace.awaited and trace.ended_nanoseconds > settled_before:
                still.append(trace)
            else:
                self._sink.send(trace)
        self._settling = still

    def close(self) -> None:
        """Hand on everything and send it; blocks for as long as the sink's bound."""
        for trace in self._settling:
            self._sink.send(trace)
        self._settling = []
        self._sink.close()

    def _note_places(self, plan: StepPlan, request_at: RequestAt) -> None:
        for fill in plan.fills:
            trace = self._live.get(request_at(fill.slot, fill.generation) or "")
            if trace is None:
                continue
            trace.places.append(Place(fill.slot, plan.cohort, fill.cached_tokens, time.perf_counter_ns()))
            self._unwatch(trace)
            if not trace.decode_planned:
                trace.holder = (fill.slot, fill.generation)
                self._watched[trace.holder] = trace

    def _unwatch(self, trace: RequestTrace) -> None:
        if trace.holder is not None:
            self._watched.pop(trace.holder, None)
            trace.holder = None


def open_tracing(contract: PodContract, clock_offset: Callable[[int], int | None]) -> TracedRequests | None:
    """Tracing to the collector that the standard OTEL_* variables name, or none.

    An invalid setting doesn't stop the engine: it is logged, and no span is sent. `clock_offset` returns a stage's
    clock minus `time.perf_counter_ns` here, None while that isn't known.
    """
    if not is_collector_named():
        return None
    config = contract.config
    identity = {
        "service.namespace": config.namespace,
        "service.instance.id": f"{config.model_name}-{contract.group}-{contract.incarnation}",
        "stageline.model": config.model_name,
        "stageline.group": str(contract.group),
        "stageline.incarnation": str(contract.incarnation),
        "stageline.stages": str(contract.stage_count),
    }
    try:
        export = SpanExport(SERVICE, identity)
    except UserError as error:
        logger.warning("no spans are sent: %s", error.message)
        return None
    from stageline_runtime.engine.telemetry.span_sender import OtelSpanSender

    logger.info("spans of traced requests are sent to an OpenTelemetry collector")
    return TracedRequests(OtelSpanSender(export, config.served_name), contract.stage_count, clock_offset)
