"""One generation on one engine: POST /v1/generate and its newline-delimited JSON events.

A request has a connection of its own and the connection's end is the request's end: closing the iterator, for
whatever reason, closes the connection, and that aborts the request in the engine. The iterator yields exactly one
Admitted, any number of Delta and one Finished; everything else is an `EngineRefusedError`, an `EngineLostError` or an
`AnswerFailedError`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
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
)
from stageline_gateway.engine_client.engine_connection import ConnectionBrokenError, EngineConnection, SilentEngineError
from stageline_gateway.engine_key import KEY_NOT_TAKEN, EngineKey
from stageline_gateway.engine_trust import EngineTrust

GENERATE_PATH: Final = "/v1/generate"
HTTP_OK: Final = 200
_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)

EngineEvent = Admitted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Resumed:
    """The engine was lost after it had admitted the request, and from here on another run continues the answer."""


StreamEvent = EngineEvent | Resumed
"""What the rest of the gateway sees of one choice: one Admitted, any number of Delta and Resumed, one Finished,
however many engines took part."""


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


@dataclass(slots=True)
class _Order:
    """Checks the order of a stream's events: Admitted first and once, nothing after the end."""

    admitted: bool = False
    finished: bool = False

    def check(self, event: Event) -> EngineEvent:
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
            case Delta():
                pass
            case _:
                assert_never(event)
        return event


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long an engine may take; the values are those of `GatewaySettings`."""

    connect_seconds: float = 2.0
    idle_seconds: float = 120.0
    stall_seconds: float = 30.0


class EngineClient:
    """Opens connections to engines. Never goes through a proxy from the environment."""

    def __init__(self, timeouts: EngineTimeouts, key: EngineKey, trust: EngineTrust | None = None) -> None:
        self._timeouts = timeouts
        self._key = key
        self._trust = trust or EngineTrust()

    async def events(
        self,
        url: str,
        request: GenerateRequest,
        on_open: Callable[[EngineConnection], None] = lambda _: None,
        tls_name: str = "",
    ) -> AsyncGenerator[EngineEvent, None]:
        """The events of `request` on the engine at `url`, whose certificate must be for `tls_name` if that is given.
        Raises the three errors."""
        limit_seconds = self._timeouts.idle_seconds
        order = _Order()
        connection, host = await self._open(url, tls_name)
        try:
            on_open(connection)
            connection.post(host, GENERATE_PATH, request.model_dump_json().encode(), self._key.authorization)
            if await connection.head(limit_seconds) != HTTP_OK:
                raise _refusal(connection.status, await connection.body(limit_seconds))
            while (line := await connection.line(limit_seconds)) is not None:
                event = order.check(_parse(line))
                if isinstance(event, Delta):
                    limit_seconds = self._timeouts.stall_seconds
                yield event
        except ConnectionBrokenError as error:
            raise EngineLostError(LossKind.CONNECTION_LOST, str(error)) from None
        except SilentEngineError:
            raise EngineLostError(LossKind.STALLED, f"The engine was silent for {limit_seconds:g} s.") from None
        finally:
            connection.close()
        if not order.finished:
            raise EngineLostError(LossKind.CONNECTION_LOST, "The engine closed the connection before the answer's end.")

    async def _open(self, url: str, tls_name: str) -> tuple[EngineConnection, str]:
        try:
            parts = urlsplit(url)
            if parts.scheme != ("https" if tls_name else "http") or not parts.hostname:
                raise ValueError(url)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(self._timeouts.connect_seconds):
                _, connection = await loop.create_connection(
                    EngineConnection,
                    parts.hostname,
                    parts.port or 80,
                    ssl=self._trust.context if tls_name else None,
                    server_hostname=tls_name or None,
                )
        except (OSError, ValueError):  # TimeoutError is an OSError
            raise EngineLostError(LossKind.UNREACHABLE, "The engine can't be reached.") from None
        return connection, parts.netloc


def _parse(line: bytes) -> Event:
    try:
        return _EVENTS.validate_json(line)
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
