"""One generation on one engine: a stream of POST /v1/multiplexed, and its events, one a line.

Leaving `generate` before the answer's end closes the stream, for whatever reason: that aborts the request in the
engine. Its taker gets exactly one Admitted, any number of PromptTokens and of Delta, and one Finished, all that came in
one read at once; everything else is an `EngineRefusedError`, an `EngineLostError` or an `AnswerFailedError`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stageline_api.engine_http import EngineError, ErrorCode, GenerateRequest, UnreadableError
from stageline_api.multiplexing import MOST_LINE_BYTES, QUICK_LINE_BYTES
from stageline_gateway.engine_client.engine_connections import EngineConnections
from stageline_gateway.engine_client.event_reader import EventReader
from stageline_gateway.engine_client.incoming_lines import (
    BROKE,
    ConnectionBrokenError,
    IncomingLines,
    SilentEngineError,
)
from stageline_gateway.engine_client.multiplexed import NotConnectedError, NotOpenedError
from stageline_gateway.engine_client.run_events import (
    EngineLostError,
    EngineRefusedError,
    LossKind,
    TakeEvents,
)
from stageline_gateway.engine_key import KEY_NOT_TAKEN, EngineKey
from stageline_gateway.engine_trust import EngineAddress, EngineTrust


class _UsedUpError(Exception):
    """A reused connection broke before any byte of an answer: most likely it had already ended."""


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """How long an engine may take; the values are those of `GatewaySettings`."""

    connect_seconds: float = 2.0
    idle_seconds: float = 120.0
    stall_seconds: float = 30.0


class EngineClient:
    """Asks engines. Never goes through a proxy from the environment."""

    def __init__(self, timeouts: EngineTimeouts, key: EngineKey, trust: EngineTrust | None = None) -> None:
        self._connections = EngineConnections(timeouts.connect_seconds, trust or EngineTrust())
        self._timeouts = timeouts
        self._key = key

    async def generate(
        self,
        engine: EngineAddress,
        request: GenerateRequest,
        take: TakeEvents,
        on_open: Callable[[IncomingLines], None] = lambda _: None,
    ) -> None:
        """Give the events of `request` on `engine` to `take`; raises the three errors, or what it does."""
        asked = _Asked(engine, request, on_open)
        reader = EventReader(take, self._timeouts.idle_seconds, self._timeouts.stall_seconds)
        try:
            await self._ask(asked, reader)
        except ConnectionBrokenError as error:
            raise EngineLostError(LossKind.CONNECTION_LOST, str(error), error.is_echo) from None
        except SilentEngineError:
            raise EngineLostError(LossKind.STALLED, f"The engine was silent for {reader.limit_seconds:g} s.") from None
        if not reader.is_finished:
            raise EngineLostError(LossKind.CONNECTION_LOST, "The engine closed the connection before the answer's end.")

    def close(self) -> None:
        """Close all connections."""
        self._connections.close()

    async def _ask(self, asked: "_Asked", reader: EventReader) -> None:
        """Once, and again where the connection had ended before anybody knew."""
        try:
            await self._exchange(asked, reader, False)
        except _UsedUpError:
            await self._exchange(asked, reader, True)

    async def _exchange(self, asked: "_Asked", reader: EventReader, is_second: bool) -> None:
        shared = self._connections.share(asked.engine, self._key.authorization, is_long=asked.is_long)
        stream = shared.stream()
        try:
            asked.on_open(stream)
            stream.ask(asked.take_line())
            await reader.read_all(stream)
        except NotConnectedError:
            raise _not_connected(is_second) from None
        except NotOpenedError as error:
            raise _refusal(error.status, error.body) from None
        except ConnectionBrokenError:
            if stream.may_be_stale and not stream.has_heard and not is_second:
                raise _UsedUpError from None
            raise
        except (SilentEngineError, EngineLostError):
            stream.doubt()
            raise
        finally:
            stream.close(is_over=reader.is_over)


class _Asked:
    """A question. Its line may be megabytes: it is kept until it is sent, and written again in case it is needed."""

    def __init__(
        self, engine: EngineAddress, request: GenerateRequest, on_open: Callable[[IncomingLines], None]
    ) -> None:
        self.engine = engine
        self.on_open = on_open
        self._request = request
        self._line: bytes | None = request.to_json()
        self._check_length(len(self._line))
        self.is_long = len(self._line) > QUICK_LINE_BYTES or _has_long_lines(request)
        """Whether others would wait for its lines."""

    def take_line(self) -> bytes:
        """For the sender."""
        line, self._line = self._line, None
        return self._request.to_json() if line is None else line

    @staticmethod
    def _check_length(num_bytes: int) -> None:
        if num_bytes > MOST_LINE_BYTES:
            message = f"The request takes {num_bytes} bytes on its way to the engine; at most {MOST_LINE_BYTES} may be."
            raise EngineRefusedError(EngineError(code=ErrorCode.INVALID_VALUE, message=message))


def _has_long_lines(request: GenerateRequest) -> bool:
    """Whether its answer has lines so long that others would wait for them."""
    return request.sampling.top_logprobs is not None or request.sampling.prompt_told is not None


def _not_connected(is_second: bool) -> EngineLostError:
    if is_second:  # the engine may have got the request on the other connection, and ended over it
        return EngineLostError(LossKind.CONNECTION_LOST, BROKE)
    return EngineLostError(LossKind.UNREACHABLE, "The engine can't be reached.")


def _refusal(status: int, body: bytes) -> EngineRefusedError | EngineLostError:
    try:
        error = EngineError.from_json(body)
        if error.code is not ErrorCode.KEY_MISSING:
            return EngineRefusedError(error)
        return EngineLostError(LossKind.PROTOCOL, KEY_NOT_TAKEN, had_no_part=True)
    except UnreadableError:
        return EngineLostError(LossKind.PROTOCOL, f"The engine answered with status {status}.")
