"""One request's answer, whole or as server-sent events, from the first engine event to the last byte.

A status is sent only once the engine has admitted the request, so a refusal always has its own status. After that a
stream ends in one of two ways: with its closing chunk and `[DONE]`, or with an error event and no `[DONE]`. Each event
is written to the client before the engine's next one is read, and connections to engines are closed before the answer
is over, however it ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stageline_api.engine_http import Admitted, Delta, Finished
from stageline_gateway.admission.admission import Permit
from stageline_gateway.engine_client.generation import Resumed, StreamEvent
from stageline_gateway.errors import ApiError, SlowReaderError, answer_broken, gateway_failed
from stageline_gateway.openai_api.answer_shapes import AnswerShape, Stamp, usage
from stageline_gateway.relay.dispatch import Deliver
from stageline_gateway.server.http_protocol import (
    Ending,
    abort_connection,
    run_while_connected,
    send_within,
)
from stageline_gateway.server.responses import SSE_DONE, SSE_HEADERS, JsonAnswer, error_answer, sse_event
from stageline_gateway.telemetry.metrics import RequestMeter
from stageline_gateway.telemetry.tracing import RequestSpan

logger = logging.getLogger(__name__)

CUT_OFF = "The gateway is shutting down and could not wait for the end of this answer."
CLIENT_GONE_CODE = 499
SERVER_ERRORS = 500
"""Statuses from here on are our fault."""
RESUMED_HEADER = "x-stageline-resumed"
"""How often a whole answer went on in another run. A stream says it in comments, and in `usage.stageline_resumes`."""


@dataclass(slots=True)
class Exchange:
    """What an answer is made from, and what accounts for it."""

    run: Callable[[Deliver], Awaitable[None]]
    """Generates all choices, and hands over each event; raises ApiError."""
    shapes: Sequence[AnswerShape]
    """One for each choice."""
    stamp: Stamp
    meter: RequestMeter
    permit: Permit
    cut: asyncio.Event
    send_timeout_seconds: float
    """How long the client may leave its end of the connection full."""
    with_logprobs: bool = False
    include_usage: bool = False
    client_request_id: str | None = None
    """The client's `X-Request-Id`, repeated in the answer."""
    span: RequestSpan = field(default_factory=RequestSpan)

    def count(self, event: StreamEvent, choice: int) -> None:
        """Account for an event in metrics, limits and places."""
        self.meter.see(event, choice)
        self.permit.see(event, choice)
        if not self.meter.choices:
            # Before the last bytes go out: a client that sees its answer end may ask again at once.
            self.permit.give_back()

    def admitted(self, event: Admitted) -> None:
        for shape in self.shapes:
            shape.admitted(event)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer: the client's own id, or the answer's, so that it can be quoted; its key's limits."""
        return {"x-request-id": self.client_request_id or self.stamp.id} | self.permit.admission.headers_for(
            self.permit.caller
        )


class Answer(Response):
    """Answers and counts one request, whichever way it ends: answer, refusal, a client that left, a gateway's end."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.started = False
        self.resumes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, meter = self.exchange, self.exchange.meter
        code = CLIENT_GONE_CODE
        bounded = send_within(send, exchange.send_timeout_seconds)
        with meter.metrics.in_flight.labels(meter.model).track_inprogress():
            try:
                with exchange.permit:
                    ending = await run_while_connected(self._answer(bounded), receive, exchange.cut)
                failure = answer_broken(CUT_OFF) if ending is Ending.CUT else None
                code = CLIENT_GONE_CODE if ending is Ending.CLIENT_GONE and not self.started else 200
            except ApiError as error:
                failure = error
            except SlowReaderError:
                failure = None
                meter.metrics.slow_readers.labels(meter.model).inc()
                await abort_connection(scope, receive)
            except Exception as error:  # a bug; the client must be told of this end too
                logger.exception("a bug in the gateway: %s request=%s", type(error).__name__, exchange.stamp.id)
                failure = gateway_failed()
            if failure is not None:
                code = 200 if self.started else failure.status
                try:
                    await self._fail(failure, scope, receive, bounded)
                except SlowReaderError:
                    await abort_connection(scope, receive)
            # While it is in flight: where none is, every answer has been counted.
            meter.metrics.requests.labels(meter.model, str(code)).inc()
        names = {"model": meter.model, "request_id": exchange.stamp.id, "key_name": exchange.permit.caller.name}
        exchange.span.end(code, **names, tokens=meter.all_tokens, resumes=self.resumes)

    async def _answer(self, send: Send) -> None:
        raise NotImplementedError

    async def _fail(self, failure: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.started:
            await error_answer(failure, self.exchange.headers)(scope, receive, send)
            return
        if failure.status >= SERVER_ERRORS:
            self.exchange.meter.metrics.broken_answers.labels(self.exchange.meter.model).inc()
        await send({"type": "http.response.body", "body": sse_event(failure.body()), "more_body": False})


class WholeAnswer(Answer):
    async def _answer(self, send: Send) -> None:
        exchange = self.exchange
        deltas: list[list[Delta]] = [[] for _ in exchange.shapes]
        ends: dict[int, Finished] = {}

        async def collect(choice: int, event: StreamEvent) -> None:
            exchange.count(event, choice)
            match event:
                case Delta():
                    deltas[choice].append(event)
                case Finished():
                    ends[choice] = event
                case Admitted():
                    exchange.admitted(event)
                case Resumed():
                    self.resumes += 1

        await exchange.run(collect)
        choices = [self._choice(shape, deltas[index], ends[index]) for index, shape in enumerate(exchange.shapes)]
        await self._send_whole(choices, usage(list(ends.values())), send)

    def _choice(self, shape: AnswerShape, deltas: list[Delta], end: Finished) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        logprobs = [one for delta in deltas for one in delta.logprobs] if self.exchange.with_logprobs else None
        return shape.whole(text, logprobs, end.reason)

    async def _send_whole(self, choices: list[dict[str, Any]], counts: dict[str, int], send: Send) -> None:
        exchange = self.exchange
        body = exchange.stamp.envelope(exchange.shapes[0].whole_kind, choices) | {"usage": counts}
        resumed = {RESUMED_HEADER: str(self.resumes)} if self.resumes else {}
        answer = JsonAnswer(body, headers=exchange.headers | resumed)
        self.started = True
        await send({"type": "http.response.start", "status": 200, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body})


class StreamedAnswer(Answer):
    """The answer as server-sent events, one chunk per piece of one choice's text."""

    async def _answer(self, send: Send) -> None:
        exchange = self.exchange
        ends: list[Finished] = []

        async def write(choice: int, event: StreamEvent) -> None:
            exchange.count(event, choice)
            shape = exchange.shapes[choice]
            match event:
                case Admitted():
                    exchange.admitted(event)
                    await self._open(send)
                case Delta():
                    # Log probabilities may come before their text, which waits for the rest of a character.
                    logprobs = event.logprobs if exchange.with_logprobs else None
                    if event.text or logprobs:
                        await self._send_choices([shape.piece(event.text, logprobs)], send)
                case Resumed():
                    self.resumes += 1
                    await self._send(b": resumed\n\n", send)
                case Finished():
                    ends.append(event)
                    await self._send_choices([shape.held_back(), shape.closing(event.reason)], send)

        await exchange.run(write)
        await self._close(ends, send)

    async def _open(self, send: Send) -> None:
        headers = [(k.encode(), v.encode()) for k, v in (SSE_HEADERS | self.exchange.headers).items()]
        self.started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        openings = [shape.opening() for shape in self.exchange.shapes]
        chunks = b"".join(sse_event(self._chunk(opening)) for opening in openings if opening is not None)
        # Without an opening chunk a comment still tells the client that its request holds a place.
        await self._send(chunks or b": admitted\n\n", send)

    async def _close(self, ends: list[Finished], send: Send) -> None:
        body = b""
        if self.exchange.include_usage:
            counts = self.exchange.stamp.envelope(self.exchange.shapes[0].chunk_kind, [])
            resumed = {"stageline_resumes": self.resumes} if self.resumes else {}
            body = sse_event(counts | {"usage": usage(ends) | resumed})
        await self._send(body + SSE_DONE, send, more=False)

    async def _send_choices(self, choices: Sequence[dict[str, Any] | None], send: Send) -> None:
        chunks = b"".join(sse_event(self._chunk(choice)) for choice in choices if choice is not None)
        if chunks:
            await self._send(chunks, send)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self.exchange.stamp.envelope(self.exchange.shapes[0].chunk_kind, [choice])
        return chunk | {"usage": None} if self.exchange.include_usage else chunk

    async def _send(self, body: bytes, send: Send, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
