"""One generation on one engine: POST /v1/generate, or a stream of POST /v1/multiplexed, and its events, one a line.

A request has a connection to itself, or a stream of one that it shares, where the engine offers that and its lines are
short; leaving `generate` before the answer's end closes connection or stream, for whatever reason: that aborts the
request in the engine. Its taker gets exactly one Admitted, any number of PromptTokens and of Delta, and
one Finished, all that came in one read at once; everything else is an `EngineRefusedError`, an `EngineLostError` or an
`AnswerFailedError`.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from time import monotonic
from typing import Final, NamedTuple, Protocol, assert_never

from pydantic import ValidationError

from stageline_api.engine_http import (
    Admitted,
    Delta,
    EngineError,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptTokens,
)
from stageline_api.multiplexing import MOST_LINE_BYTES, Refused
from stageline_gateway.engine_client.connection_pool import ConnectionPool
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.event_lines import EventLines, plain_text
from stageline_gateway.engine_client.incoming_lines import (
    BROKE,
    ConnectionBrokenError,
    IncomingLines,
    Pause,
    SilentEngineError,
)
from stageline_gateway.engine_client.late_accounts import LateAccounts
from stageline_gateway.engine_client.multiplexed import HTTP_OK, PERIOD_SECONDS, NotConnectedError, NotSharedError
from stageline_gateway.engine_client.written_request import written
from stageline_gateway.engine_key import KEY_NOT_TAKEN, EngineKey
from stageline_gateway.engine_trust import EngineAddress, EngineTrust

GENERATE_PATH: Final = "/v1/generate"

EngineEvent = Admitted | PromptTokens | Delta | Finished


@dataclass(frozen=True, slots=True)
class Resumed:
    """The engine was lost after it had admitted the request, and from here on another run continues the answer."""


StreamEvent = EngineEvent | Resumed
"""What the rest of the gateway sees of one choice: one Admitted, any number of PromptTokens, of Delta and of Resumed,
one Finished, however many engines took part."""


TakeEvents = Callable[[Sequence[EngineEvent]], Pause | None]
"""Takes the next events of one run, at once and never none."""


class WrittenTexts(NamedTuple):
    """Texts that were written, one behind the other."""

    stamps: Sequence[tuple[float, int]]
    """When each came, by the monotonic clock in seconds, and of how many tokens it is."""
    token_ids: Sequence[int]
    """Of all of them."""
    characters: int
    """Of all of them."""


class TextTaker(Protocol):
    """Takes text by itself, as it would Deltas of it: nearly all there is of an answer is told in this way, which makes
    no event of it.

    What is to be accounted for may come later, many pieces at once (`late_accounts`), but always before an event, the
    end, or that anybody is told of the loss of this engine.
    """

    @property
    def may_wait(self) -> bool:
        """Whether accounts may wait; else each piece is accounted for when it has been written."""

    @property
    def write(self) -> Callable[[str], Pause | None]:
        """Writes the next text, at once."""

    def account(self, written: WrittenTexts) -> None:
        """Account for what was written since the last time."""


class LossKind(StrEnum):
    """How an engine failed a request; a metric label."""

    UNREACHABLE = "unreachable"
    CONNECTION_LOST = "connection_lost"
    STALLED = "stalled"
    PROTOCOL = "protocol"
    ENGINE_FAILED = "engine_failed"
    HUNG = "hung"
    """Its group stopped making progress while it computed the request, which may be why."""
    ABORTED = "aborted"
    GONE = "gone"
    """Discovery or the probe say that the engine is no more, and it is silent."""
    LEFT = "left"
    """It drains, and another group takes the request over: no failure."""


@dataclass(eq=False)
class EngineLostError(Exception):
    """The engine did not finish the request. `message` is one sentence for the client."""

    kind: LossKind
    message: str
    is_echo: bool = False
    """Another request was lost by the very same event: a connection that both had."""


@dataclass(eq=False)
class EngineRefusedError(Exception):
    """The engine answered that it will not admit the request."""

    error: EngineError


@dataclass(eq=False)
class AnswerFailedError(Exception):
    """The engine is well, and no engine can finish the answer. `message` is one sentence for the client."""

    message: str


class _UsedUpError(Exception):
    """A connection that was used before broke without a word of an answer: most likely it had ended meanwhile."""


@dataclass(slots=True)
class _Order:
    """Checks the order of a stream's events: Admitted first and once, nothing after the end."""

    admitted: bool = False
    finished: bool = False
    is_over: bool = False
    """Whether the engine said its last word on it, whatever that was."""

    def check(self, event: Event | Refused) -> EngineEvent:
        if isinstance(event, Delta) and self.admitted and not self.finished:
            return event
        begins = isinstance(event, Admitted | Refused)
        if self.finished or (begins == self.admitted and not isinstance(event, Failed)):
            raise EngineLostError(LossKind.PROTOCOL, f"The engine sent '{event.type}' out of order.")
        self.is_over = isinstance(event, Refused | Failed | Finished)
        match event:
            case Admitted():
                self.admitted = True
            case Refused(error=error):
                raise EngineRefusedError(error)
            case Failed(is_final=True):
                raise AnswerFailedError(event.message)
            case Failed(is_suspect=is_suspect):
                kind = LossKind.HUNG if is_suspect else LossKind.ENGINE_FAILED
                raise EngineLostError(kind, f"The engine could not finish the answer: {event.message}")
            case Finished(reason=FinishReason.ABORT):
                raise EngineLostError(LossKind.ABORTED, "The engine aborted the request.")
            case Finished():
                self.finished = True
            case Delta() | PromptTokens():
                pass
            case _:
                assert_never(event)
        return event


@dataclass(slots=True)
class _EventReader:
    """Lines to events of one run. A line that is no event, or out of order, fails it behind those before it."""

    take: TakeEvents
    texts: TextTaker | None
    """Takes text by itself, once an answer has begun."""
    timeouts: "EngineTimeouts"
    limit_seconds: float
    """How long the engine may be silent now."""
    engine: EngineAddress
    late: LateAccounts
    order: _Order = field(default_factory=_Order)
    lines: EventLines = field(default_factory=EventLines)
    _source: IncomingLines | None = None
    _write: Callable[[str], Pause | None] | None = None
    """Writes text, while the next that comes is most likely text and nothing else, for which nothing else is to be
    done."""
    _unaccounted: list[float | int] = field(default_factory=list)
    """Of each text when it came, a float, and behind it its tokens: one short list, to which little is added for a
    token, and nothing else of the text is kept."""
    _characters: int = 0
    """Of the same texts."""
    _may_wait: bool = False
    """Whether accounts of text may."""

    def __post_init__(self) -> None:
        self._may_wait = self.texts is not None and self.texts.may_wait

    async def read_all(self, source: IncomingLines) -> None:
        """Until the answer's end, or the source's."""
        self._source = source
        await source.relay(self.read, self.limit_seconds)

    def read(self, lines: list[bytes]) -> Pause | None:
        if (write := self._write) is not None and (told := plain_text(lines)) is not None:
            text, token_ids = told
            if not self._unaccounted and self._may_wait:
                self.late.add(self.engine, self.account)
            self._unaccounted.append(monotonic())
            self._unaccounted += token_ids
            self._characters += len(text)
            pause = write(text)
            if not self._may_wait:
                self.account()
            return pause
        return self._read_events(lines)

    def account(self) -> None:
        """Have all text accounted for that was written."""
        if self._unaccounted and self.texts is not None:
            written = _told_apart(self._unaccounted, self._characters)
            self._unaccounted, self._characters = [], 0
            self.texts.account(written)

    def close(self) -> None:
        """Nothing more is read."""
        self.account()
        self.late.discard(self.engine, self.account)

    def _read_events(self, lines: list[bytes]) -> Pause | None:
        assert self._source is not None, "read without a source"
        self.account()
        events: list[EngineEvent] = []
        try:
            for found in self.lines.events(lines):
                event = self.order.check(found)
                events.append(event)
                if isinstance(event, Delta) and self.limit_seconds != (stall := self.timeouts.stall_seconds):
                    self.limit_seconds = stall
                    self._source.allow_silence(stall)
                is_steady = self.lines.is_plain and isinstance(event, Delta) and not event.logprobs
                self._write = self.texts.write if is_steady and self.texts is not None else None
                if self.order.finished:
                    break  # whatever an engine says behind that, in this read or another, is nobody's any more
        except ValidationError:
            lost = EngineLostError(LossKind.PROTOCOL, "The engine sent an event that can't be read.")
            return self._fail_behind(events, lost)
        except Exception as error:
            return self._fail_behind(events, error)
        if self.order.finished:
            self._source.stop()
        return self.take(events)

    def _fail_behind(self, events: list[EngineEvent], error: Exception) -> Pause:
        if isinstance(error, EngineLostError | EngineRefusedError | AnswerFailedError):
            error = error.with_traceback(None)  # nobody may come to raise it
        return partial(_fail_after, self.take(events) if events else None, [error])


async def _fail_after(pause: Pause | None, failures: list[Exception]) -> None:
    """Raise the one failure there is. It is taken out of the list, since a frame that holds what was raised through it
    is freed by nobody but the garbage collector."""
    if pause is not None:
        await pause()
    raise failures.pop()


def _told_apart(unaccounted: Sequence[float | int], characters: int) -> WrittenTexts:
    """The texts that a reader noted: each of them a float, and its tokens behind it."""
    begins = [place for place, one in enumerate(unaccounted) if isinstance(one, float)]
    ends = [*begins[1:], len(unaccounted)]
    stamps = [(unaccounted[begin], end - begin - 1) for begin, end in zip(begins, ends, strict=True)]
    return WrittenTexts(stamps, [one for one in unaccounted if isinstance(one, int)], characters)


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long an engine may take; the values are those of `GatewaySettings`."""

    connect_seconds: float = 2.0
    idle_seconds: float = 120.0
    stall_seconds: float = 30.0


class EngineClient:
    """Asks engines. Never goes through a proxy from the environment."""

    def __init__(
        self,
        timeouts: EngineTimeouts,
        key: EngineKey,
        trust: EngineTrust | None = None,
        period_seconds: float = PERIOD_SECONDS,
    ) -> None:
        """What comes faster than it can be given out is given out once in `period_seconds`."""
        self._pool = ConnectionPool(timeouts.connect_seconds, trust or EngineTrust(), period_seconds)
        self._timeouts = timeouts
        self._key = key
        self._late = LateAccounts()

    async def generate(
        self,
        engine: EngineAddress,
        request: GenerateRequest,
        take: TakeEvents,
        on_open: Callable[[IncomingLines], None] = lambda _: None,
        *,
        texts: TextTaker | None = None,
        shares: bool = False,
    ) -> None:
        """Give the events of `request` on `engine` to `take`; raises the three errors, or what it does.

        Once an answer has begun, text goes to `texts` where there is one; all of it has been accounted for when this
        ends, in whatever way. With `shares` the engine lets requests share a connection.
        """
        asked = _Asked(engine, written(request), on_open)
        shares = shares and _has_short_lines(request) and len(asked.body) <= MOST_LINE_BYTES
        reader = _EventReader(take, texts, self._timeouts, self._timeouts.idle_seconds, engine, self._late)
        try:
            await self._ask_to_the_end(asked, reader, shares)
        except EngineLostError:
            reader.account()
            self._late.bring_up_to_date(engine)  # others may have shown, before this, that it answers
            raise
        finally:
            reader.close()

    def close(self) -> None:
        """Close the connections that rest, and those that are shared."""
        self._pool.close()

    async def _ask_to_the_end(self, asked: "_Asked", reader: "_EventReader", shares: bool) -> None:
        try:
            await self._ask(asked, reader, shares)
        except ConnectionBrokenError as error:
            raise EngineLostError(LossKind.CONNECTION_LOST, str(error), error.is_echo) from None
        except SilentEngineError:
            raise EngineLostError(LossKind.STALLED, f"The engine was silent for {reader.limit_seconds:g} s.") from None
        if not reader.order.finished:
            raise EngineLostError(LossKind.CONNECTION_LOST, "The engine closed the connection before the answer's end.")

    async def _ask(self, asked: "_Asked", reader: "_EventReader", shares: bool) -> None:
        """On a connection that others use too or, where there is none, on its own."""
        if shares:
            try:
                await _once_more(self._share, asked, reader)
                return
            except NotSharedError as error:
                refusal = _refusal(error.status, error.body)
                if isinstance(refusal, EngineLostError) and refusal.message == KEY_NOT_TAKEN:
                    raise refusal from None
                self._pool.keep_apart(asked.engine)
        await _once_more(self._exchange, asked, reader)

    async def _exchange(self, asked: "_Asked", reader: "_EventReader", is_second: bool) -> None:
        """On a connection of its own."""
        connection, was_used = await self._open(asked, is_second)
        try:
            asked.on_open(connection)
            connection.post(asked.engine.host, GENERATE_PATH, asked.body, self._key.authorization)
            if await connection.head(reader.limit_seconds) != HTTP_OK:
                raise _refusal(connection.status, await connection.body(reader.limit_seconds))
            await reader.read_all(connection)
        except ConnectionBrokenError:
            if was_used and not connection.has_heard:
                raise _UsedUpError from None
            raise
        finally:
            self._pool.give_back(asked.engine, connection, ended_well=reader.order.finished)
            connection.forget_failure()

    async def _open(self, asked: "_Asked", is_second: bool) -> tuple[EngineConnection, bool]:
        try:
            return await self._pool.take(asked.engine, is_new=is_second)
        except (OSError, ValueError):  # TimeoutError is an OSError
            raise _not_connected(is_second) from None

    async def _share(self, asked: "_Asked", reader: "_EventReader", is_second: bool) -> None:
        """On a connection that others use too."""
        shared = self._pool.share(asked.engine, self._key.authorization)
        if shared is None:
            await self._exchange(asked, reader, is_second)
            return
        stream = shared.stream()
        try:
            asked.on_open(stream)
            stream.ask(asked.body)
            await reader.read_all(stream)
        except NotConnectedError:
            raise _not_connected(is_second) from None
        except ConnectionBrokenError:
            if stream.may_be_stale and not stream.has_heard and not is_second:
                raise _UsedUpError from None
            raise
        except (SilentEngineError, EngineLostError):
            stream.doubt()
            raise
        finally:
            stream.close(is_over=reader.order.is_over)


class _Asked(NamedTuple):
    engine: EngineAddress
    body: bytes
    on_open: Callable[[IncomingLines], None]


_Exchange = Callable[[_Asked, _EventReader, bool], Awaitable[None]]


async def _once_more(exchange: _Exchange, asked: _Asked, reader: _EventReader) -> None:
    """Once, and again where the connection had ended before anybody knew."""
    try:
        await exchange(asked, reader, False)
    except _UsedUpError:
        await exchange(asked, reader, True)


def _has_short_lines(request: GenerateRequest) -> bool:
    """Whether no line of its answer is so long that others would wait for it."""
    return request.sampling.top_logprobs is None and request.sampling.prompt_told is None


def _not_connected(is_second: bool) -> EngineLostError:
    if is_second:  # the engine may have got the request on the other connection, and ended over it
        return EngineLostError(LossKind.CONNECTION_LOST, BROKE)
    return EngineLostError(LossKind.UNREACHABLE, "The engine can't be reached.")


def _refusal(status: int, body: bytes) -> EngineRefusedError | EngineLostError:
    try:
        error = EngineError.model_validate_json(body)
        if error.code is not ErrorCode.KEY_MISSING:
            return EngineRefusedError(error)
        return EngineLostError(LossKind.PROTOCOL, KEY_NOT_TAKEN)
    except ValidationError:
        return EngineLostError(LossKind.PROTOCOL, f"The engine answered with status {status}.")
