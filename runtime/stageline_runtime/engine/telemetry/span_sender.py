"""Spans of requests through OpenTelemetry, made in a separate thread: the engine's loop only enqueues them.

The queue is bounded: if it is full, a request loses only its spans. The loop itself runs only one part of
OpenTelemetry, the start of a request's span. There the sampler decides, by the client's `sampled` flag unless
OTEL_TRACES_SAMPLER is set.
"""

import logging
import queue
import threading
from typing import Any, Final

from opentelemetry.trace import StatusCode

from stageline_api.telemetry.span_export import CLOSE_SECONDS, SpanExport
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.telemetry.request_trace import (
    REQUEST,
    RequestTrace,
    SpanData,
    attributes_at_begin,
    attributes_at_end,
    moments,
    spans_within,
)

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 1024
"""Ended requests that wait for their spans to be made."""


class OtelSpanSender:
    """Implements `tracing.SpanSink`."""

    def __init__(self, export: SpanExport, model: str) -> None:
        self._export = export
        self._model = model
        self._lost = 0
        self._waiting: queue.Queue[RequestTrace | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def begin(self, request: AdmittedRequest, began_nanoseconds: int) -> object | None:
        named = {"traceparent": request.traceparent, "tracestate": request.tracestate}
        headers = {name: value for name, value in named.items() if value is not None}
        span = self._export.server(REQUEST, headers, attributes_at_begin(request, self._model), began_nanoseconds)
        return span if span.is_recording() else None

    def send(self, trace: RequestTrace) -> None:
        try:
            self._waiting.put_nowait(trace)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Send the queued spans; blocks for at most twice `CLOSE_SECONDS`."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS / 2)
            self._thread.join(CLOSE_SECONDS / 2)
        except queue.Full:
            pass
        if self._lost:
            logger.warning("spans of %d requests were lost: they came faster than they could be made", self._lost)
        self._export.close()

    def _run(self) -> None:
        while (trace := self._waiting.get()) is not None:
            try:
                self._make(trace)
            except Exception:
                about = {"request_id": trace.request.request_id}
                logger.exception("the spans of a request could not be made", extra=about)

    def _make(self, trace: RequestTrace) -> None:
        span: Any = trace.span
        for child in spans_within(trace):
            self._add(child, span)
        for moment in moments(trace):
            span.add_event(moment.name, timestamp=moment.at_nanoseconds)
        span.set_attributes(attributes_at_end(trace))
        outcome = trace.outcome
        if outcome is not None and outcome.error:
            span.set_status(StatusCode.ERROR, outcome.message)
        span.end(trace.anchor.of_performance(trace.ended_nanoseconds))

    def _add(self, data: SpanData, parent: Any) -> None:
        span = self._export.child(data.name, parent, data.attributes, data.begin_nanoseconds)
        for child in data.children:
            self._add(child, span)
        span.end(data.end_nanoseconds)
