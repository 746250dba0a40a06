"""One request's answer, whole or as server-sent events, from the first engine event to the last byte.

A status is sent only once the engine has admitted the request, so a refusal always has its own status. After that a
stream ends in one of two ways: with its closing chunk and `[DONE]`, or with an error event and no `[DONE]`. What came
from the engine in one read is written in one, in the call that read it, before anything more is taken from there.
Connections to engines are let go before the answer is over, however it ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stageline_api.engine_http import Admitted, Delta, Finished, PromptTokens
from stageline_gateway.admission.admission import Permit
from stageline_gateway.client_stream import ClientStream, Cut, Ending, Pause, client_of, run_while_connected
from stageline_gateway.endpoints.json_answers import (
    SSE_DONE,
    SSE_HEADERS,
    JsonAnswer,
    encode_json,
    error_answer,
    sse_event,
)
from stageline_gateway.endpoints.kept_answer import KeptChoice, with_kept
from stageline_gateway.endpoints.written_pieces import WrittenPieces, between
from stageline_gateway.engine_client.run_events import Resumed, StreamEvent, TextTaker, WrittenTexts
from stageline_gateway.errors import ApiError, answer_broken, gateway_failed
from stageline_gateway.openai_api.answer_shapes import AnswerShape, ChatShape, Stamp, usage
from stageline_gateway.openai_api.client_words import ClientWords
from stageline_gateway.openai_api.thoughts import ThoughtTokens
from stageline_gateway.relay.dispatch import Deliver
from stageline_gateway.telemetry.metrics import RequestMeter
from stageline_gateway.telemetry.tracing import RequestSpan

logger = logging.getLogger(__name__)

CUT_OFF = "The gateway is shutting down and could not wait for the end of this answer."
CLIENT_GONE_CODE = 499
SERVER_ERRORS = 500
"""Statuses from here on are our fault."""
RESUMED_HEADER = "x-stageline-resumed"
"""How often a whole answer went on in another run. A stream says it in comments, and in `usage.stageline_resumes`."""
RESUMED_COMMENT = b": resumed\n\n"
"""Goes out with what follows it: clients that strip each piece of the body, as `vllm bench serve` does, would take what
comes after a comment by itself for its end."""
IGNORED_HEADER = "x-stageline-ignored"
"""Fields of the request that changed nothing, of those that `openai_api.known_fields` lists."""


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """What tells the client of these fields; nothing where there are none."""
    return {IGNORED_HEADER: ",".join(names)} if names else {}


@dataclass(slots=True)
class Exchange:
    """What an answer is made from, and what accounts for it."""

    run: Callable[[Deliver, TextTaker | None], Awaitable[None]]
    """Generates all choices, and hands over each event, or a single choice's text by itself; raises ApiError."""
    shapes: Sequence[AnswerShape]
    """One for each choice."""
    stamp: Stamp
    meter: RequestMeter
    permit: Permit
    cut: Cut
    with_logprobs: bool = False
    include_usage: bool = False
    num_prompts: int = 1
    client_request_id: str | None = None
    """The client's `X-Request-Id`, repeated in the answer."""
    ignored: tuple[str, ...] = ()
    """Names of the client's fields that change nothing here."""
    words: ClientWords = field(default_factory=ClientWords)
    """What the client calls the fields that engines name."""
    span: RequestSpan = field(default_factory=RequestSpan)
    thoughts: list[ThoughtTokens] = field(default_factory=list)
    """Of each choice, what it spends on thoughts; none where it can have none, or tells them nowhere."""

    @property
    def names(self) -> dict[str, str | None]:
        """The request's, for a line of the log."""
        return {"request_id": self.stamp.id, "client_request_id": self.client_request_id}

    @property
    def may_wait(self) -> bool:
        """Whether accounts may wait. Not where tokens are limited: a limit is exact at every time."""
        return not self.permit.caller.limits.have_rates

    def count(self, event: StreamEvent, choice: int, at: float | None = None) -> None:
        """Account for an event in metrics, limits and places, which came `at` that time of the meter's clock."""
        self.meter.see(event, choice, at)
        self.permit.see(event, choice)
        if not self.meter.choices:
            # Before the last bytes go out: a client that sees its answer end may ask again at once.
            self.permit.give_places_back()

    def count_text(self, written: WrittenTexts) -> None:
        """Account for text of the one choice there is, as for Deltas of it."""
        self.meter.see_texts(written.stamps)
        self.permit.see_tokens(len(written.token_ids))

    def admitted(self, event: Admitted) -> None:
        # A client is told once, whatever engines say for each of its choices.
        self.ignored = tuple(dict.fromkeys((*self.ignored, *map(self.words.of, event.ignored))))
        for shape in self.shapes:
            shape.admitted(event)
        if event.thoughts is not None and isinstance(self.shapes[0], ChatShape):
            self.thoughts = [ThoughtTokens(event.thoughts) for _ in self.shapes]

    def take_thought(self, choice: int, text: str, num_tokens: int) -> None:
        """The next text of a choice may be thoughts."""
        if self.thoughts:
            self.thoughts[choice].take(text, num_tokens)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer: the client's own id, or the answer's, so that it can be quoted; its key's limits;
        what was ignored."""
        names = {"x-request-id": self.client_request_id or self.stamp.id}
        return names | ignored_header(self.ignored) | self.permit.admission.headers_for(self.permit.caller)


class _Begin(NamedTuple):
    """Of a stream."""

    ignored: tuple[str, ...]
    """What its headers say of that."""
    headers: list[tuple[bytes, bytes]]
    head: bytes | None
    """As the client has it made of them."""


class Answer(Response):
    """Answers and counts one request, whichever way it ends: answer, refusal, a client that left, a gateway's end."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.started = False
        self.resumes = 0
        self._said_first = b""
        """What the next bytes of a stream begin with."""
        self._ahead: _Begin | None = None
        """The stream's begin, where it is known before there is anything to say."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, meter = self.exchange, self.exchange.meter
        code, client = CLIENT_GONE_CODE, client_of(scope)
        with meter.of_model.in_flight.track_inprogress():
            try:
                with exchange.permit:
                    ending = await run_while_connected(self._answer(client), client, exchange.cut)
                failure = answer_broken(CUT_OFF) if ending is Ending.CUT else None
                was_given_up = ending is Ending.CLIENT_GONE and client.is_slow
                if was_given_up:
                    meter.metrics.slow_readers.labels(meter.model).inc()
                elif ending is Ending.CLIENT_GONE:
                    meter.client_left()
                is_gone = ending is Ending.CLIENT_GONE and not self.started
                code = CLIENT_GONE_CODE if is_gone or was_given_up else 200
            except ApiError as error:
                failure = error.bare()
            except Exception as error:  # a bug; the client must be told of this end too
                logger.exception("a bug in the gateway: %s", type(error).__name__, extra=exchange.names)
                failure = gateway_failed()
            if failure is not None:
                self.started = client.has_begun  # what waits for a full client to read was never written
                code = 200 if self.started else failure.status
                if not client.is_complete:
                    await self._fail(failure, scope, receive, send)
            # While it is in flight: where none is, every answer has been counted.
            meter.of_model.answered(code)
            logger.debug("answered with %d: %d tokens", code, meter.all_tokens, extra=exchange.names)
        names = {"model": meter.model, "request_id": exchange.stamp.id, "key_name": exchange.permit.caller.name}
        exchange.span.end(code, **names, tokens=meter.all_tokens, resumes=self.resumes)

    async def _answer(self, client: ClientStream) -> None:
        raise NotImplementedError

    def _write(self, client: ClientStream, body: bytes, *, more: bool = True) -> Pause | None:
        """Write a piece of a stream, which is opened by the first."""
        if self._said_first:
            body, self._said_first = self._said_first + body, b""
        if self.started:
            return client.write(body, more) if body or not more else None
        self.started = True
        ignored, headers, head = self._ahead or self._begin(client)
        if ignored != self.exchange.ignored:  # the engine told of more
            _, headers, head = self._begin(client)
        return client.open(headers, body, more, head)

    def _begin(self, client: ClientStream) -> _Begin:
        headers = [(k.encode(), v.encode()) for k, v in (SSE_HEADERS | self.exchange.headers).items()]
        return _Begin(self.exchange.ignored, headers, client.head_of(headers))

    async def _send_at_once(self, client: ClientStream, answer: Response) -> None:
        """Send an answer that isn't streamed. It counts as held until its client has taken nearly all of it."""
        self.started = True
        if (pause := client.open(answer.raw_headers, bytes(answer.body), more=False)) is not None:
            await pause()
        await client.taken()

    def _usage(self, ends: Mapping[int, Finished]) -> dict[str, Any]:
        counts = usage([ends[choice] for choice in range(len(ends))], self.exchange.num_prompts)
        spent = sum(one.count for one in self.exchange.thoughts)
        return counts | {"completion_tokens_details": {"reasoning_tokens": spent}} if spent else counts

    async def _fail(self, failure: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.started:
            await error_answer(failure, self.exchange.headers)(scope, receive, send)
            return
        if failure.status >= SERVER_ERRORS:
            self.exchange.meter.metrics.broken_answers.labels(self.exchange.meter.model).inc()
        await send({"type": "http.response.body", "body": sse_event(failure.body()), "more_body": False})


class WholeAnswer(Answer):
    async def _answer(self, client: ClientStream) -> None:
        exchange = self.exchange
        kept = [KeptChoice(shape, exchange.with_logprobs) for shape in exchange.shapes]
        ends: dict[int, Finished] = {}
        held = exchange.permit.body

        def collect(choice: int, events: Sequence[StreamEvent]) -> None:
            for event in events:
                exchange.count(event, choice)
                match event:
                    case Delta():
                        held.grow(kept[choice].take(event))
                        exchange.take_thought(choice, event.text, len(event.token_ids))
                    case PromptTokens():
                        held.grow(kept[choice].take_prompt(event))
                    case Finished():
                        ends[choice] = event
                    case Admitted():
                        exchange.admitted(event)
                    case Resumed():
                        self.resumes += 1

        await exchange.run(collect, None)
        # Calls of tools are looked for letter by letter.
        whole = await held.work(lambda: self._whole(kept, ends))
        kept.clear()
        await self._send_at_once(client, whole)

    def _whole(self, kept: Sequence[KeptChoice], ends: Mapping[int, Finished]) -> Response:
        exchange, counts = self.exchange, self._usage(ends)
        written = [one.written(ends[index].reason) for index, one in enumerate(kept)]
        choices = [one.choice for one in written]
        whole = exchange.stamp.envelope(exchange.shapes[0].whole_kind, choices) | written[0].at_top
        body = with_kept(encode_json(whole | {"usage": counts}), written)
        resumed = {RESUMED_HEADER: str(self.resumes)} if self.resumes else {}
        return Response(body, headers=exchange.headers | resumed, media_type=JsonAnswer.media_type)


class StreamedAnswer(Answer):
    """The answer as server-sent events, one chunk per piece of one choice's text.

    What an event is accounted for follows in the next turn of the loop, when its bytes have gone out: a first token
    waits for no metric. The answer's last event is accounted for at once, and so is all of a key that has limits; text
    by itself later still (`_StreamedText`). All has been accounted for when the answer is over.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._uncounted: list[tuple[float, int, Sequence[StreamEvent]]] = []
        self._pieces = WrittenPieces(exchange.stamp, exchange.shapes, exchange.with_logprobs, exchange.include_usage)
        self._ends: dict[int, Finished] = {}

    async def _answer(self, client: ClientStream) -> None:
        texts = _StreamedText(self, client, self._pieces)

        def write(choice: int, events: Sequence[StreamEvent]) -> Pause | None:
            body = b"".join([self._written(choice, event, texts) for event in events])
            self._count_soon(choice, events)
            if len(self._ends) == len(self.exchange.shapes):
                return self._write(client, body + self._end(), more=False)
            return self._write(client, body) if body or not self.started else None

        if self.exchange.may_wait:  # else its headers say what is left of the key's limits when it is written
            asyncio.get_running_loop().call_soon(self._begin_ahead, client)
        try:
            await self.exchange.run(write, texts)
        finally:
            self.count_all()

    def _begin_ahead(self, client: ClientStream) -> None:
        """While the engine computes, so that a first token does not wait for it."""
        if not self.started:
            self._ahead = self._begin(client)
            self._pieces.write_ahead()

    def write_text(self, client: ClientStream, text: str) -> Pause | None:
        """As `write`, for text of the one choice there is, which is accounted for by itself."""
        body = self._pieces.delta(0, Delta(text=text, token_ids=()))
        return self._write(client, body) if body or not self.started else None

    def count_all(self) -> None:
        """Account for the events that were written."""
        uncounted, self._uncounted = self._uncounted, []
        for at, choice, events in uncounted:
            for event in events:
                self.exchange.count(event, choice, at)

    def _count_soon(self, choice: int, events: Sequence[StreamEvent]) -> None:
        may_wait = self.exchange.may_wait
        if not self._uncounted and may_wait:
            asyncio.get_running_loop().call_soon(self.count_all)
        self._uncounted.append((self.exchange.meter.clock(), choice, events))
        if not may_wait or isinstance(events[-1], Finished):
            self.count_all()

    def _written(self, choice: int, event: StreamEvent, texts: "_StreamedText") -> bytes:
        match event:
            case Delta():
                if self.exchange.include_usage:
                    self.exchange.take_thought(choice, event.text, len(event.token_ids))
                return self._pieces.delta(choice, event)
            case PromptTokens():
                return self._pieces.prompt(choice, event)
            case Admitted():
                self.exchange.admitted(event)
                # Without an opening chunk the status alone says that the request holds a place.
                return self._pieces.openings()
            case Resumed():
                self.resumes += 1
                self._said_first = RESUMED_COMMENT
                texts.begin_anew()
                return b""
            case Finished():
                self._ends[choice] = event
                return self._pieces.closing(choice, event.reason)

    def _end(self) -> bytes:
        if not self.exchange.include_usage:
            return SSE_DONE
        resumed = {"stageline_resumes": self.resumes} if self.resumes else {}
        return self._pieces.counts(self._usage(self._ends) | resumed) + SSE_DONE


class _StreamedText:
    """Writes a stream's text that comes by itself (`TextTaker`), and touches little more than the connection for it."""

    __slots__ = ("_answer", "_around", "_client", "_pieces", "_uncounted")

    def __init__(self, answer: StreamedAnswer, client: ClientStream, pieces: WrittenPieces) -> None:
        self._answer = answer
        self._client = client
        self._pieces = pieces
        self._around: tuple[bytes, bytes] | None = None
        """The bytes around a piece's text, once nothing else can stand before it."""
        self._uncounted: list[str] = []
        """Texts that may be thoughts, and of which nobody has said yet how many tokens they are."""

    @property
    def may_wait(self) -> bool:
        return self._answer.exchange.may_wait

    def begin_anew(self) -> None:
        """Something stands before the next text."""
        self._around = None

    def write(self, text: str) -> Pause | None:
        """As the answer would a Delta of it, but for the accounts."""
        if (around := self._around) is None:
            pause = self._answer.write_text(self._client, text)
            if (exchange := self._answer.exchange).thoughts and exchange.include_usage:
                self._uncounted.append(text)
            if text:
                self._around = self._pieces.around(0)
            return pause
        return self._client.write(between(around, text)) if text else None

    def account(self, written: WrittenTexts) -> None:
        """Account for what was written, behind the events that came before it."""
        self._answer.count_all()
        self._answer.exchange.count_text(written)
        for text, (_, num_tokens) in zip(self._uncounted, written.stamps, strict=False):
            self._answer.exchange.take_thought(0, text, num_tokens)
        self._uncounted.clear()
