"""One generation on one engine: POST /v1/generate, or a stream of POST /v1/multiplexed, and its events, one a line.

A request has a connection to itself, or a stream of one that it shares, where the engine offers that and its lines are
short; leaving `generate` before the answer's end closes connection or stream, for whatever reason: that aborts the
request in the engine. Its taker gets exactly one Admitted, any number of PromptTokens and of Delta, and
one Finished, all that came in one read at once; everything else is an `EngineRefusedError`, an `EngineLostError` or an
`AnswerFailedError`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from stageline_api.engine_http import EngineError, ErrorCode, GenerateRequest
from stageline_api.multiplexing import MOST_LINE_BYTES
from stageline_gateway.engine_client.connection_pool import ConnectionPool
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.event_reader import EventReader
from stageline_gateway.engine_client.incoming_lines import (
    BROKE,
    ConnectionBrokenError,
    IncomingLines,
    SilentEngineError,
)
from stageline_gateway.engine_client.late_accounts import LateAccounts
from stageline_gateway.engine_client.multiplexed import HTTP_OK, PERIOD_SECONDS, NotConnectedError, NotSharedError
from stageline_gateway.engine_client.run_events import (
    EngineLostError,
    EngineRefusedError,
    LossKind,
    TakeEvents,
    TextTaker,
)
from stageline_gateway.engine_client.written_request import written
from stageline_gateway.engine_key import KEY_NOT_TAKEN, EngineKey
from stageline_gateway.engine_trust import EngineAddress, EngineTrust

GENERATE_PATH: Final = "/v1/generate"


class _UsedUpError(Exception):
    """A connection that was used before broke without a word of an answer: most likely it had ended meanwhile."""


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
        asked = _Asked(engine, request, on_open)
        shares = shares and _has_short_lines(request) and asked.line_bytes <= MOST_LINE_BYTES
        limits = self._timeouts.idle_seconds, self._timeouts.stall_seconds
        reader = EventReader(take, texts, *limits, engine, self._late)
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

    async def _ask_to_the_end(self, asked: "_Asked", reader: EventReader, shares: bool) -> None:
        try:
            await self._ask(asked, reader, shares)
        except ConnectionBrokenError as error:
            raise EngineLostError(LossKind.CONNECTION_LOST, str(error), error.is_echo) from None
        except SilentEngineError:
            raise EngineLostError(LossKind.STALLED, f"The engine was silent for {reader.limit_seconds:g} s.") from None
        if not reader.order.finished:
            raise EngineLostError(LossKind.CONNECTION_LOST, "The engine closed the connection before the answer's end.")

    async def _ask(self, asked: "_Asked", reader: EventReader, shares: bool) -> None:
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

    async def _exchange(self, asked: "_Asked", reader: EventReader, is_second: bool) -> None:
        """On a connection of its own."""
        connection, was_used = await self._open(asked, is_second)
        try:
            asked.on_open(connection)
            connection.post(asked.engine.host, GENERATE_PATH, asked.take_line(), self._key.authorization)
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

    async def _share(self, asked: "_Asked", reader: EventReader, is_second: bool) -> None:
        """On a connection that others use too."""
        shared = self._pool.share(asked.engine, self._key.authorization)
        if shared is None:
            await self._exchange(asked, reader, is_second)
            return
        stream = shared.stream()
        try:
            asked.on_open(stream)
            stream.ask(asked.take_line())
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


class _Asked:
    """A question. Its line may be megabytes: it is kept until it is sent, and written again in case it is needed."""

    def __init__(
        self, engine: EngineAddress, request: GenerateRequest, on_open: Callable[[IncomingLines], None]
    ) -> None:
        self.engine = engine
        self.on_open = on_open
        self._request = request
        self._line: bytes | None = written(request)
        self.line_bytes = len(self._line)

    def take_line(self) -> bytes:
        """For who sends it."""
        line, self._line = self._line, None
        return written(self._request) if line is None else line


_Exchange = Callable[[_Asked, EventReader, bool], Awaitable[None]]


async def _once_more(exchange: _Exchange, asked: _Asked, reader: EventReader) -> None:
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
        return EngineLostError(LossKind.PROTOCOL, KEY_NOT_TAKEN, had_no_part=True)
    except ValidationError:
        return EngineLostError(LossKind.PROTOCOL, f"The engine answered with status {status}.")
