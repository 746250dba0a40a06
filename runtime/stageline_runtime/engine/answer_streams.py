"""The way back of every request: its tokens as events to whoever submitted it, and what is counted on that way.

A stream ends with exactly one EndEvent or FailEvent; whoever stops reading before that aborts the request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from stageline_api.engine_http import FinishReason
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, EndEvent, FailEvent, TokenEvent
from stageline_runtime.engine.scheduling.row_selection import FirstRow
from stageline_runtime.engine.scheduling.scheduler import NewToken
from stageline_runtime.engine.telemetry.request_metrics import GROUP_LOST, GUIDE, RequestMetrics, RequestTimes
from stageline_runtime.engine.telemetry.request_trace import Outcome, RequestTrace
from stageline_runtime.engine.telemetry.tracing import RequestTracing

ABORTED: Final = Outcome(FinishReason.ABORT, "aborted", "Whoever asked left before the end.")


class _Stream:
    """A queue that ends with an EndEvent or a FailEvent."""

    def __init__(self, prompt_tokens: int, times: RequestTimes, trace: RequestTrace | None) -> None:
        self.events: asyncio.Queue[CoreEvent] = asyncio.Queue()
        self.times = times
        self.trace = trace
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0


class AnswerStreams:
    """Streams of all live requests, by their ids."""

    def __init__(self, metrics: RequestMetrics, tracing: RequestTracing) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._streams: dict[str, _Stream] = {}
        self.prompt_tokens_total = 0
        """Of requests that got as far as their first row."""
        self.generation_tokens_total = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request: AdmittedRequest, abort: Callable[[str], None]) -> AsyncIterator[CoreEvent]:
        """The events of a new request; `abort` is called when its reader leaves before the last one."""
        times = self._metrics.arrived()
        stream = _Stream(len(request.prompt_token_ids), times, self._tracing.submitted(request, times))
        self._streams[request.request_id] = stream
        return self._events(request.request_id, stream, abort)

    def show_waiting(self) -> None:
        """Bring the gauge of who waits the longest up to now."""
        self._metrics.show_waiting(stream.times for stream in self._streams.values())

    def started(self, first_rows: Iterable[FirstRow]) -> None:
        """The first rows of some requests were planned."""
        for first in first_rows:
            stream = self._streams.get(first.request_id)
            if stream is not None:
                stream.cached_tokens = min(first.cached_tokens, stream.prompt_tokens)
                self._metrics.scheduled(stream.times, stream.prompt_tokens)
                self.prompt_tokens_total += stream.prompt_tokens
            self._metrics.looked_up(first.num_inputs, first.cached_tokens)

    def deliver(self, token: NewToken) -> None:
        """Hand a token to its request's reader."""
        self.generation_tokens_total += 1
        stream = self._streams.get(token.request_id)
        self._metrics.sampled(None if stream is None else stream.times)
        if stream is None:
            return
        if token.failure is not None:
            self._metrics.failed(GUIDE)
            sentence = "The answer can't be guided any further"
            outcome = Outcome(None, GUIDE, f"{sentence}.")
            self._close(token.request_id, FailEvent(f"{sentence}: {token.failure}.", is_final=True), outcome)
            return
        logprobs = () if token.logprobs is None else (token.logprobs,)
        stream.events.put_nowait(TokenEvent((token.token,), logprobs, stream.cached_tokens))
        if token.finished:
            self._end(token.request_id, FinishReason.STOP if token.stopped else FinishReason.LENGTH)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a stream that nobody wants any more, if there is one."""
        if request_id in self._streams:
            self._end(request_id, reason)

    def fail_all(self, message: str) -> None:
        """End every stream with a failure."""
        for request_id in list(self._streams):
            self._metrics.failed(GROUP_LOST)
            self._close(request_id, FailEvent(message), Outcome(None, GROUP_LOST, message))

    def _end(self, request_id: str, reason: FinishReason) -> None:
        self._metrics.ended(self._streams[request_id].times, reason)
        outcome = ABORTED if reason is FinishReason.ABORT else Outcome(reason)
        self._close(request_id, EndEvent(reason), outcome)

    def _close(self, request_id: str, event: EndEvent | FailEvent, outcome: Outcome) -> None:
        stream = self._streams.pop(request_id)
        stream.events.put_nowait(event)
        if stream.trace is not None:
            self._tracing.ended(stream.trace, outcome)

    async def _events(self, request_id: str, stream: _Stream, abort: Callable[[str], None]) -> AsyncIterator[CoreEvent]:
        try:
            while True:
                event = await stream.events.get()
                yield event
                if not isinstance(event, TokenEvent):
                    return
        finally:
            if self._streams.get(request_id) is stream:
                abort(request_id)
