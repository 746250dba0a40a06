"""One generation on one engine: POST /v1/generate and its newline-delimited JSON events.

A request has a connection of its own and the connection's end is the request's end: closing the iterator, for
whatever reason, closes the connection, and that aborts the request in the engine. The iterator yields exactly one
Admitted, any number of Delta and one Finished; everything else is an `EngineRefusedError` or an `EngineLostError`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import httpx
from pydantic import TypeAdapter, ValidationError

from stageline_api.engine_http import (
    Admitted,
    Delta,
    EngineError,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
)

GENERATE_PATH = "/v1/generate"
LINE_LIMIT_BYTES = 8 * 1024 * 1024
_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)

StreamEvent = Admitted | Delta | Finished


class LossKind(StrEnum):
    """How an engine failed a request; a metric label."""

    UNREACHABLE = "unreachable"
    CONNECTION_LOST = "connection_lost"
    STALLED = "stalled"
    PROTOCOL = "protocol"
    ENGINE_FAILED = "engine_failed"
    ABORTED = "aborted"


@dataclass(eq=False)
class EngineLostError(Exception):
    """The engine did not finish the request. `message` is one sentence for the client."""

    kind: LossKind
    message: str


@dataclass(eq=False)
class EngineRefusedError(Exception):
    """The engine answered that it will not admit the request."""

    error: EngineError


@dataclass(slots=True)
class _Order:
    """Checks the order of a stream's events: Admitted first and once, nothing after the end."""

    admitted: bool = False
    finished: bool = False

    def check(self, event: Event) -> StreamEvent:
        if self.finished or (isinstance(event, Admitted) == self.admitted and not isinstance(event, Failed)):
            raise EngineLostError(LossKind.PROTOCOL, f"The engine sent '{event.type}' out of order.")
        match event:
            case Admitted():
                self.admitted = True
            case Failed():
                raise EngineLostError(
                    LossKind.ENGINE_FAILED, f"The engine could not finish the answer: {event.message}"
                )
            case Finished(reason=FinishReason.ABORT):
                raise EngineLostError(LossKind.ABORTED, "The engine aborted the request.")
            case Finished():
                self.finished = True
            case Delta():
                pass
            case _:
                assert_never(event)
        return event


class EngineClient:
    """HTTP connections to engines. Never goes through a proxy from the environment."""

    def __init__(self, connect_timeout_seconds: float, idle_timeout_seconds: float) -> None:
        self._idle_timeout_seconds = idle_timeout_seconds
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(idle_timeout_seconds, connect=connect_timeout_seconds),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def events(self, url: str, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        """The events of `request` on the engine at `url`; raises EngineRefusedError or EngineLostError."""
        body = request.model_dump_json().encode()
        headers = {"content-type": "application/json"}
        order = _Order()
        try:
            async with self._http.stream("POST", url + GENERATE_PATH, content=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response.status_code, await response.aread())
                async with aclosing(_lines(response)) as lines:
                    async for line in lines:
                        yield order.check(_parse(line))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise EngineLostError(LossKind.UNREACHABLE, "The engine can't be reached.") from None
        except httpx.TimeoutException:
            message = f"The engine was silent for {self._idle_timeout_seconds:g} s."
            raise EngineLostError(LossKind.STALLED, message) from None
        except httpx.HTTPError:
            raise EngineLostError(LossKind.CONNECTION_LOST, "The connection to the engine broke.") from None
        if not order.finished:
            raise EngineLostError(LossKind.CONNECTION_LOST, "The engine closed the connection before the answer's end.")


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    # httpx's own aiter_lines splits at U+2028 and the like too, which JSON strings may hold unescaped.
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > LINE_LIMIT_BYTES:
            raise EngineLostError(LossKind.PROTOCOL, "The engine sent an event that is too long.")


def _parse(line: bytes) -> Event:
    try:
        return _EVENTS.validate_json(line)
    except ValidationError:
        raise EngineLostError(LossKind.PROTOCOL, "The engine sent an event that can't be read.") from None


def _refusal(status: int, body: bytes) -> EngineRefusedError | EngineLostError:
    try:
        return EngineRefusedError(EngineError.model_validate_json(body))
    except ValidationError:
        return EngineLostError(LossKind.PROTOCOL, f"The engine answered with status {status}.")
