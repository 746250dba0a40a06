"""One generation on one engine: POST /v1/generate and its newline-delimited JSON events.

A request has a connection to itself, and leaving `generate` before the answer's end closes it, for whatever reason:
that aborts the request in the engine. Its taker gets exactly one Admitted, any number of PromptTokens and of Delta, and
one Finished, all that came in one read at once; everything else is an `EngineRefusedError`, an `EngineLostError` or an
`AnswerFailedError`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, assert_never
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

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
from stageline_gateway.engine_client.connection_pool import ConnectionPool, EngineAddress
from stageline_gateway.engine_client.engine_connection import (
    ConnectionBrokenError,
    EngineConnection,
    Pause,
    SilentEngineError,
)
from stageline_gateway.engine_key import KEY_NOT_TAKEN, EngineKey
from stageline_gateway.engine_trust import EngineTrust

GENERATE_PATH: Final = "/v1/generate"
HTTP_OK: Final = 200
_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)

EngineEvent = Admitted | PromptTokens | Delta | Finished


@dataclass(frozen=True, slots=True)
class Resumed:
    """The engine was lost after it had admitted the request, and from here on another run continues the answer."""


StreamEvent = EngineEvent | Resumed
"""What the rest of the gateway sees of one choice: one Admitted, any number of PromptTokens, of Delta and of Resumed,
one Finished, however many engines took part."""


TakeEvents = Callable[[Sequence[EngineEvent]], Pause | None]
"""Takes the next events of one run, at once and never none."""


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

    def check(self, event: Event) -> EngineEvent:
        if isinstance(event, Delta) and self.admitted and not self.finished:
            return event
        if self.finished or (isinstance(event, Admitted) == self.admitted and not isinstance(event, Failed)):
            raise EngineLostError(LossKind.PROTOCOL, f"The engine sent '{event.type}' out of order.")
        match event:
            case Admitted():
                self.admitted = True
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

    connection: EngineConnection
    take: TakeEvents
    timeouts: "EngineTimeouts"
    limit_seconds: float
    """How long the engine may be silent now."""
    order: _Order = field(default_factory=_Order)

    def read(self, lines: list[bytes]) -> Pause | None:
        events: list[EngineEvent] = []
        try:
            for line in lines:
                event = self.order.check(_parse(line))
                events.append(event)
                if isinstance(event, Delta) and self.limit_seconds != (stall := self.timeouts.stall_seconds):
                    self.limit_seconds = stall
                    self.connection.allow_silence(stall)
        except Exception as error:
            return self._fail_behind(events, error)
        if self.order.finished:
            self.connection.stop()
        return self.take(events)

    def _fail_behind(self, events: list[EngineEvent], error: Exception) -> Pause:
        pause = self.take(events) if events else None

        async def fail() -> None:
            if pause is not None:
                await pause()
            raise error

        return fail


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long an engine may take; the values are those of `GatewaySettings`."""

    connect_seconds: float = 2.0
    idle_seconds: float = 120.0
    stall_seconds: float = 30.0


class EngineClient:
    """Asks engines over connections of its own. Never goes through a proxy from the environment."""

    def __init__(self, timeouts: EngineTimeouts, key: EngineKey, trust: EngineTrust | None = None) -> None:
        self._pool = ConnectionPool(timeouts.connect_seconds, trust or EngineTrust())
        self._timeouts = timeouts
        self._key = key

    async def generate(
        self,
        url: str,
        request: GenerateRequest,
        take: TakeEvents,
        on_open: Callable[[EngineConnection], None] = lambda _: None,
        tls_name: str = "",
    ) -> None:
        """Give the events of `request` on the engine at `url` to `take`; raises the three errors, or what it does.

        The engine's certificate must be for `tls_name`, if that is given.
        """
        engine = EngineAddress(url, tls_name)
        try:
            await self._exchange(engine, request, take, on_open)
        except _UsedUpError:
            await self._exchange(engine, request, take, on_open, is_second=True)

    def close(self) -> None:
        """Close the connections that rest."""
        self._pool.close()

    async def _exchange(
        self,
        engine: EngineAddress,
        request: GenerateRequest,
        take: TakeEvents,
        on_open: Callable[[EngineConnection], None],
        is_second: bool = False,
    ) -> None:
        connection, was_used = await self._open(engine, is_second)
        reader = _EventReader(connection, take, self._timeouts, self._timeouts.idle_seconds)
        try:
            on_open(connection)
            host, body = urlsplit(engine.url).netloc, request.model_dump_json().encode()
            connection.post(host, GENERATE_PATH, body, self._key.authorization)
            if await connection.head(reader.limit_seconds) != HTTP_OK:
                raise _refusal(connection.status, await connection.body(reader.limit_seconds))
            await connection.relay(reader.read, reader.limit_seconds)
        except ConnectionBrokenError as error:
            if was_used and not connection.has_heard:
                raise _UsedUpError from None
            raise EngineLostError(LossKind.CONNECTION_LOST, str(error)) from None
        except SilentEngineError:
            raise EngineLostError(LossKind.STALLED, f"The engine was silent for {reader.limit_seconds:g} s.") from None
        finally:
            self._pool.give_back(engine, connection, ended_well=reader.order.finished)
        if not reader.order.finished:
            raise EngineLostError(LossKind.CONNECTION_LOST, "The engine closed the connection before the answer's end.")

    async def _open(self, engine: EngineAddress, is_second: bool) -> tuple[EngineConnection, bool]:
        try:
            return await self._pool.take(engine, is_new=is_second)
        except (OSError, ValueError):  # TimeoutError is an OSError
            if is_second:  # the engine may have got the request on the other connection, and ended over it
                raise EngineLostError(LossKind.CONNECTION_LOST, "The connection to the engine broke.") from None
            raise EngineLostError(LossKind.UNREACHABLE, "The engine can't be reached.") from None


def _parse(line: bytes) -> Event:
    try:
        return _EVENTS.validator.validate_json(line)  # type: ignore[no-any-return]
    except ValidationError:
        raise EngineLostError(LossKind.PROTOCOL, "The engine sent an event that can't be read.") from None


def _refusal(status: int, body: bytes) -> EngineRefusedError | EngineLostError:
    try:
        error = EngineError.model_validate_json(body)
        if error.code is not ErrorCode.KEY_MISSING:
            return EngineRefusedError(error)
        return EngineLostError(LossKind.PROTOCOL, KEY_NOT_TAKEN)
    except ValidationError:
        return EngineLostError(LossKind.PROTOCOL, f"The engine answered with status {status}.")
