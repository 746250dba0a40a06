"""Delivers each request's tokens as events to the sink that it was submitted with, and counts them.

A sink gets exactly one EndEvent or FailEvent, and no event after it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from stageline_api.engine_http import FinishReason
from stageline_runtime.engine.core_api import AdmittedRequest, AnswerSink, EndEvent, FailEvent, PromptEvent, TokenEvent
from stageline_runtime.engine.scheduling.row_selection import FirstRow
from stageline_runtime.engine.scheduling.scheduler import NewToken, ReportedPrompt
from stageline_runtime.engine.telemetry.metrics import GROUP_LOST, GUIDE, RequestMetrics, RequestTimes
from stageline_runtime.engine.telemetry.request_trace import Outcome, RequestTrace
from stageline_runtime.engine.telemetry.tracing import TracedRequests

ABORTED: Final = Outcome(FinishReason.ABORT, "aborted", "The client disconnected before the end.")


@dataclass(slots=True)
class _Stream:
    sink: AnswerSink
    prompt_tokens: int
    times: RequestTimes
    trace: RequestTrace | None
    cached_tokens: int = 0


class AnswerStreams:
    def __init__(self, metrics: RequestMetrics, tracing: TracedRequests | None) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._streams: dict[str, _Stream] = {}
        self.prompt_tokens_total = 0
        """Sum over the requests that reached their first row."""
        self.generation_tokens_total = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        times = self._metrics.arrived()
        trace = self._tracing.submitted(request, times) if self._tracing is not None else None
        self._streams[request.request_id] = _Stream(sink, len(request.prompt_token_ids), times, trace)

    def longest_wait_seconds(self) -> float:
        """How long the request waits by now that came first of those without a row."""
        return self._metrics.longest_wait_seconds(stream.times for stream in self._streams.values())

    def show_waiting(self) -> None:
        """Update the gauge of the longest wait for a slot."""
        self._metrics.show_waiting(self.longest_wait_seconds())

    def started(self, first_rows: Iterable[FirstRow]) -> None:
        """The first rows of some requests were planned."""
        for first in first_rows:
            stream = self._streams.get(first.request_id)
            if stream is not None:
                stream.cached_tokens = min(first.cached_tokens, stream.prompt_tokens)
                self._metrics.scheduled(stream.times, stream.prompt_tokens)
                self.prompt_tokens_total += stream.prompt_tokens
            self._metrics.looked_up(first.num_inputs, first.cached_tokens)

    def tell_prompt(self, reported: ReportedPrompt) -> None:
        """Hand log probabilities of its prompt to a request's sink."""
        stream = self._streams.get(reported.request_id)
        if stream is not None:
            stream.sink(PromptEvent(reported.report))

    def deliver(self, token: NewToken) -> None:
        """Hand a token to its request's sink."""
        self.generation_tokens_total += 1
        stream = self._streams.get(token.request_id)
        self._metrics.sampled(None if stream is None else stream.times)
        if stream is None:
            return
        if token.failure is not None:
            sentence = "The answer can't be guided any further"
            self.fail(token.request_id, f"{sentence}: {token.failure}.", GUIDE, f"{sentence}.", is_final=True)
            return
        event = TokenEvent((token.token,), () if token.logprobs is None else (token.logprobs,), stream.cached_tokens)
        if not token.finished:
            stream.sink(event)
            return
        # Counted when the core ends it, before the sink is notified: after that no abort reaches it.
        reason = FinishReason.STOP if token.stopped else FinishReason.LENGTH
        self._count_end(token.request_id, reason)
        stream.sink(event)
        stream.sink(EndEvent(reason))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._count_end(request_id, reason)
            stream.sink(EndEvent(reason))

    def fail_all(self, message: str, is_running: Callable[[str], bool], hung: bool = False) -> None:
        """End all streams because the group is lost; `hung`: while it computed those for which `is_running` is true."""
        for request_id in list(self._streams):
            running = is_running(request_id)
            self.fail(request_id, message, GROUP_LOST, is_suspect=hung and running, was_waiting=not running)

    def fail(
        self,
        request_id: str,
        message: str,
        reason: str,
        traced: str | None = None,
        *,
        is_final: bool = False,
        is_suspect: bool = False,
        was_waiting: bool = False,
    ) -> None:
        """End a stream, if it is open, with a sentence; `reason` is what the metric counts it as.

        `traced` is the sentence without what a client has written, for the trace.
        """
        if request_id in self._streams:
            self._metrics.failed(reason)
            stream = self._close(request_id, Outcome(None, reason, message if traced is None else traced))
            stream.sink(FailEvent(message, is_final, is_suspect, was_waiting))

    def found_cached(self, request_id: str, num_tokens: int) -> None:
        """`num_tokens` of a request's prompt were cached: reported with its next token."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.cached_tokens = num_tokens

    def _count_end(self, request_id: str, reason: FinishReason) -> None:
        stream = self._close(request_id, ABORTED if reason is FinishReason.ABORT else Outcome(reason))
        self._metrics.ended(stream.times, reason)

    def _close(self, request_id: str, outcome: Outcome) -> _Stream:
        stream = self._streams.pop(request_id)
        if self._tracing is not None and stream.trace is not None:
            self._tracing.ended(stream.trace, outcome)
        return stream
