"""One request's answer, whole or as server-sent events, from the first engine event to the last byte.

A status is sent only once the engine has admitted the request, so a refusal always has its own status. After that a
stream ends in one of two ways: with its closing chunk and `[DONE]`, or with an error event and no `[DONE]`. What came
from the engine in one read is written in one, in the call that read it, before anything more is taken from there.
Connections to engines are let go before the answer is over, however it ends.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stageline_api.engine_http import Admitted, Delta, Finished, PromptTokens
from stageline_gateway.admission.admission import Permit
from stageline_gateway.client_stream import ClientStream, Cut, Ending, Pause, client_of, run_while_connected
from stageline_gateway.endpoints.json_answers import (
    SSE_DONE,
    SSE_HEADERS,
    JsonAnswer,
    error_answer,
    sse_event,
)
from stageline_gateway.endpoints.kept_answer import KeptChoice
from stageline_gateway.engine_client.run_events import Resumed, StreamEvent
from stageline_gateway.errors import ApiError, answer_broken, gateway_failed
from stageline_gateway.openai_api.answer_shapes import AnswerShape, ChatShape, Stamp, usage
from stageline_gateway.openai_api.client_names import ClientNames
from stageline_gateway.openai_api.thoughts import ThoughtTokens
from stageline_gateway.relay.dispatch import Deliver
from stageline_gateway.telemetry.metrics import RequestMeter
from stageline_gateway.telemetry.tracing import RequestSpan

logger = logging.getLogger(__name__)

Refuse = Callable[[ApiError, Mapping[str, str]], Response]
"""Writes a refusal in the API's own form."""

CUT_OFF = "The gateway is shutting down and could not wait for the end of this answer."
CLIENT_GONE_CODE = 499
SERVER_ERRORS = 500
"""Statuses from here on are our fault."""
RESUMED_HEADER = "x-stageline-resumed"
"""How often a whole answer went on in another run. A stream says it in comments, and in `usage.stageline_resumes`."""
RESUMED_COMMENT = b": resumed\n\n"
"""Goes out with what follows it: clients that strip each piece of the body, as `vllm bench serve` does, would take what
comes after a comment by itself for its end."""
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
"""Only in a long silence: the same clients would take it for the end of the answer."""
IGNORED_HEADER = "x-stageline-ignored"
"""Fields of the request that changed nothing, of those that `openai_api.known_fields` lists."""


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """What tells the client of these fields; nothing where there are none."""
    return {IGNORED_HEADER: ",".join(names)} if names else {}


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
    cut: Cut
    with_logprobs: bool = False
    include_usage: bool = False
    keep_alive_seconds: float = 15.0
    """Longest silence of a stream."""
    num_prompts: int = 1
    client_request_id: str | None = None
    """The client's `X-Request-Id`, repeated in the answer."""
    id_header: str = "x-request-id"
    """Another header that has the answer's id, if it has another name."""
    ignored: tuple[str, ...] = ()
    """Names of the client's fields that change nothing here."""
    client_names: ClientNames = field(default_factory=ClientNames)
    """What the client calls the fields that engines name."""
    span: RequestSpan = field(default_factory=RequestSpan)
    thoughts: list[ThoughtTokens] = field(default_factory=list)
    """Of each choice, what it spends on thoughts; none where it can have none, or tells them nowhere."""

    @property
    def names(self) -> dict[str, str | None]:
        """The request's, for a line of the log."""
        return {"request_id": self.stamp.id, "client_request_id": self.client_request_id}

    def count(self, event: StreamEvent, choice: int) -> None:
        """Account for an event in metrics, limits and places."""
        self.meter.see(event, choice)
        self.permit.see(event, choice)
        if not self.meter.choices:
            # Before the last bytes go out: a client that sees its answer end may ask again at once.
            self.permit.give_places_back()

    def admitted(self, event: Admitted) -> None:
        # A client is told once, whatever engines say for each of its choices.
        self.ignored = tuple(dict.fromkeys((*self.ignored, *map(self.client_names.of, event.ignored))))
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
        names = dict.fromkeys(("x-request-id", self.id_header), self.client_request_id or self.stamp.id)
        return names | ignored_header(self.ignored) | self.permit.admission.headers_for(self.permit.caller)


_LOOKS: Final = 3
"""In the longest silence. It is over when nothing came between all of them but the first."""


class KeepAlive:
    """Calls `say` whenever nothing was written to `client` for up to `seconds`; from now on, until `stop`.

    Proxies cut a connection on which nothing comes for a minute or less. No stream has a timer that is set again for
    each token: writing one costs a flag, and looks are few.
    """

    def __init__(self, client: ClientStream, seconds: float, say: Callable[[], None]) -> None:
        self._client = client
        self._period_seconds = seconds / _LOOKS
        self._say = say
        self._quiet_looks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._period_seconds, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        client = self._client
        self._quiet_looks = 0 if client.has_written else self._quiet_looks + 1
        client.has_written = False
        if self._quiet_looks >= _LOOKS - 1 and client.is_idle:
            self._say()
        self._timer = self._loop.call_later(self._period_seconds, self._look)


class Answer(Response):
    """Answers and counts one request, whichever way it ends: answer, refusal, a client that left, a gateway's end."""

    def __init__(self, exchange: Exchange, *, streams: bool, refuse: Refuse = error_answer) -> None:
        super().__init__()
        self.exchange = exchange
        self.started = False
        self._streams = streams
        self._refuse = refuse
        self._ends: dict[int, Finished] = {}
        self.keep_alive = KEEP_ALIVE_COMMENT
        """What a stream says in a long silence."""
        self.resumes = 0
        self._said_first = b""
        """What the next bytes of a stream begin with."""

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
        with self._kept_alive(client) if self._streams else nullcontext():
            await self.exchange.run(partial(self._take, client))
        if not self._streams:
            await self._send_at_once(client, await self._whole())

    def _take(self, client: ClientStream, choice: int, events: Sequence[StreamEvent]) -> Pause | None:
        """Account for what came at once of a choice, and write what a stream says of it."""
        body = b"".join([self._written(choice, event) for event in events])
        if not self._streams:
            return None
        if len(self._ends) == len(self.exchange.shapes):
            return self._write(client, body + self._end(), more=False)
        return self._write(client, body) if body or not self.started else None

    def _written(self, choice: int, event: StreamEvent) -> bytes:
        self.exchange.count(event, choice)
        match event:
            case Delta():
                self.exchange.take_thought(choice, event.text, len(event.token_ids))
                return self._delta(choice, event)
            case PromptTokens():
                return self._prompt(choice, event)
            case Admitted():
                self.exchange.admitted(event)
                return self._opening(event)
            case Resumed():
                self.resumes += 1
                self._said_first = RESUMED_COMMENT
                return b""
            case Finished():
                self._ends[choice] = event
                return self._closing(choice, event)

    # What a stream says of each event; an answer that is sent at once keeps what it needs, and says nothing.

    def _opening(self, event: Admitted) -> bytes:  # noqa: ARG002 - for streams
        return b""

    def _delta(self, choice: int, event: Delta) -> bytes:
        raise NotImplementedError

    def _prompt(self, choice: int, event: PromptTokens) -> bytes:  # noqa: ARG002 - for those that tell it
        return b""

    def _closing(self, choice: int, event: Finished) -> bytes:  # noqa: ARG002 - for streams
        return b""

    def _end(self) -> bytes:
        """Behind the end of the last choice."""
        return b""

    def _failed(self, failure: ApiError) -> bytes:
        """The end of a stream that can't go on."""
        return sse_event(failure.body())

    async def _whole(self) -> JsonAnswer:
        """The answer that is sent at once."""
        raise NotImplementedError

    def _json(self, whole: dict[str, Any]) -> JsonAnswer:
        resumed = {RESUMED_HEADER: str(self.resumes)} if self.resumes else {}
        return JsonAnswer(whole, headers=self.exchange.headers | resumed)

    def _write(self, client: ClientStream, body: bytes, *, more: bool = True) -> Pause | None:
        """Write a piece of a stream, which is opened by the first."""
        if self._said_first:
            body, self._said_first = self._said_first + body, b""
        if self.started:
            return client.write(body, more) if body or not more else None
        self.started = True
        headers = [(name.encode(), value.encode()) for name, value in (SSE_HEADERS | self.exchange.headers).items()]
        return client.open(headers, body, more)

    @contextmanager
    def _kept_alive(self, client: ClientStream) -> Iterator[None]:
        """Have a stream say that it is there whenever it was silent for long, before its first event too. From then on
        a refusal is an event of the stream: its status is gone."""
        keep_alive = KeepAlive(client, self.exchange.keep_alive_seconds, partial(self._keep_alive, client))
        try:
            yield
        finally:
            keep_alive.stop()

    def _keep_alive(self, client: ClientStream) -> None:
        if not self.started:
            self._write(client, self.keep_alive)
        elif client.has_begun:  # else what it begins with waits to be written
            client.write(self.keep_alive)

    async def _send_at_once(self, client: ClientStream, answer: Response) -> None:
        """Send an answer that isn't streamed. It counts as held until its client has taken nearly all of it."""
        self.started = True
        if (pause := client.open(answer.raw_headers, bytes(answer.body), more=False)) is not None:
            await pause()
        await client.taken()

    def _usage(self) -> dict[str, Any]:
        counts = usage([self._ends[choice] for choice in range(len(self._ends))], self.exchange.num_prompts)
        spent = sum(one.count for one in self.exchange.thoughts)
        return counts | {"completion_tokens_details": {"reasoning_tokens": spent}} if spent else counts

    async def _fail(self, failure: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.started:
            await self._refuse(failure, self.exchange.headers)(scope, receive, send)
            return
        if failure.status >= SERVER_ERRORS:
            self.exchange.meter.metrics.broken_answers.labels(self.exchange.meter.model).inc()
        # When what was written before is on its way.
        if (pause := client_of(scope).write(self._failed(failure), more=False)) is not None:
            await pause()


class WholeAnswer(Answer):
    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, streams=False)
        self._kept = [KeptChoice(shape, exchange.with_logprobs) for shape in exchange.shapes]

    def _delta(self, choice: int, event: Delta) -> bytes:
        self.exchange.permit.body.grow(self._kept[choice].take(event))
        return b""

    def _prompt(self, choice: int, event: PromptTokens) -> bytes:
        self.exchange.permit.body.grow(self._kept[choice].take_prompt(event))
        return b""

    async def _whole(self) -> JsonAnswer:
        # Calls of tools are looked for letter by letter.
        whole = await self.exchange.permit.body.work(self._made)
        self._kept.clear()
        return whole

    def _made(self) -> JsonAnswer:
        exchange = self.exchange
        written = [one.written(self._ends[index].reason) for index, one in enumerate(self._kept)]
        choices, (at_top, *_) = zip(*written, strict=True)
        whole = exchange.stamp.envelope(exchange.shapes[0].whole_kind, list(choices)) | at_top
        return self._json(whole | {"usage": self._usage()})


class StreamedAnswer(Answer):
    """The answer as server-sent events, a chunk for each piece of a choice's text."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange, streams=True)

    def _opening(self, event: Admitted) -> bytes:  # noqa: ARG002 - it is the same whatever the engine says
        # Without an opening chunk the status alone says that the request holds a place.
        openings = (one.opening() for one in self.exchange.shapes)
        return self._chunks([opening for opening in openings if opening is not None])

    def _delta(self, choice: int, event: Delta) -> bytes:
        # Log probabilities may come before their text, which waits for the rest of a character.
        logprobs = event.logprobs if self.exchange.with_logprobs else None
        if not event.text and not logprobs:
            return b""
        return self._chunks(self.exchange.shapes[choice].piece(event.text, logprobs))

    def _prompt(self, choice: int, event: PromptTokens) -> bytes:
        chunk = self.exchange.shapes[choice].prompt(event.tokens).chunk
        return b"" if chunk is None else self._chunks([chunk])

    def _closing(self, choice: int, event: Finished) -> bytes:
        shape = self.exchange.shapes[choice]
        return self._chunks([*shape.held_back(event.reason), shape.closing(event.reason)])

    def _end(self) -> bytes:
        if not self.exchange.include_usage:
            return SSE_DONE
        resumed = {"stageline_resumes": self.resumes} if self.resumes else {}
        return sse_event(self._envelope([]) | {"usage": self._usage() | resumed}) + SSE_DONE

    def _chunks(self, choices: Sequence[dict[str, Any]]) -> bytes:
        with_usage = {"usage": None} if self.exchange.include_usage else {}
        return b"".join([sse_event(self._envelope([choice]) | with_usage) for choice in choices])

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self.exchange.stamp.envelope(self.exchange.shapes[0].chunk_kind, choices)
