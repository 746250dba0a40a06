"""One connection to an engine that many answers share (`stageline_api.multiplexing`).

What came in one read is given out by stream, all lines of a stream at once, in the call that read it: so the tokens of
a step cost one read, however many streams they are for. Where that took long, nothing is read for as long: new requests
have their turn, and what comes meanwhile is written to clients in fewer and larger pieces, so that a gateway that is
short of time does less of what costs it most. A stream whose reader is slow is held in the engine; the others go on.
The connection's end is the end of all its streams, each of which says so where it is waited for. Lines of a stream that
nobody reads any more are dropped, and one that can't be told apart ends the connection.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from stageline_api.multiplexing import MULTIPLEXED_PATH, Close, GoOn, Hold
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.incoming_lines import ConnectionBrokenError, IncomingLines, Pause

logger = logging.getLogger(__name__)

ENDED: Final = "The connection to the engine broke."
MOST_WAITING_LINES: Final = 16384
"""Of all streams; each of them holds far fewer itself."""
SHORT_SECONDS: Final = 0.5e-3
"""Who gave out for no longer than this reads on at once."""
LONGEST_REST_SECONDS: Final = 10e-3
"""So much later than it could have been a token may be, however long giving out took."""
NOT_READ: Final = "The engine sent a line that can't be read."


class MultiplexedStream(IncomingLines):
    """One answer on a shared connection: `ask`, then `relay`; `close` in any case."""

    def __init__(self, connection: "MultiplexedConnection", number: int) -> None:
        super().__init__()
        self._connection = connection
        self._number = number

    def ask(self, request: bytes) -> None:
        """Have the engine generate what `request`, a `GenerateRequest` as JSON, asks for."""
        self._connection.send(b'{"type":"open","stream":%d,"request":%b}\n' % (self._number, request))

    def bring(self, lines: list[bytes]) -> None:
        """Lines of this stream have come; blank ones say only that the engine is there."""
        self._heard()
        self._lines += [line for line in lines if line]
        self._arrived()

    def broke(self, why: str) -> None:
        """Nothing more comes."""
        self._fail(ConnectionBrokenError(why))

    def close(self, *, has_ended: bool) -> None:
        """Nobody reads on. Unless it `has_ended`, the engine is told to stop."""
        self._disarm()
        self._connection.leave(self._number, has_ended)

    def _hold(self) -> None:
        self._connection.say(Hold(stream=self._number))

    def _go_on(self) -> None:
        self._connection.say(GoOn(stream=self._number))


class MultiplexedConnection:
    """`begin`, then as many `stream`s as are wanted; `close` ends them all."""

    def __init__(
        self, connection: EngineConnection, idle_seconds: float, on_end: Callable[["MultiplexedConnection"], None]
    ) -> None:
        """It closes itself when it has had no stream for `idle_seconds`; `on_end` is called when no more can be had."""
        connection.most_waiting = MOST_WAITING_LINES
        self._connection = connection
        self._idle_seconds = idle_seconds
        self._on_end = on_end
        self._streams: dict[int, MultiplexedStream] = {}
        self._next = 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._relaying: asyncio.Task[None] | None = None

    async def begin(self, host: str, authorization: str, limit_seconds: float) -> tuple[int, bytes]:
        """Ask for it; returns the engine's status, and what it says where that isn't 200 and there is none to be had.

        Raises ConnectionBrokenError and SilentEngineError.
        """
        connection = self._connection
        connection.post_openly(host, MULTIPLEXED_PATH, authorization)
        status = await connection.head(limit_seconds)
        if status != 200:
            return status, await connection.body(limit_seconds)
        self._relaying = asyncio.create_task(self._relay())
        return status, b""

    @property
    def is_open(self) -> bool:
        return self._relaying is not None and not self._relaying.done() and self._connection.is_open

    @property
    def is_resting(self) -> bool:
        """Whether it was used, and nobody uses it now: it may have ended without anybody's having noticed."""
        return self._next > 0 and not self._streams

    def stream(self) -> MultiplexedStream:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        number, self._next = self._next, self._next + 1
        stream = self._streams[number] = MultiplexedStream(self, number)
        return stream

    def send(self, line: bytes) -> None:
        if self._connection.is_open:  # else its streams are about to hear of its end
            self._connection.send(line)

    def say(self, line: Close | Hold | GoOn) -> None:
        self.send(line.model_dump_json().encode() + b"\n")

    def leave(self, number: int, has_ended: bool) -> None:
        """Forget a stream."""
        if self._streams.pop(number, None) is None:
            return
        if not has_ended:
            self.say(Close(stream=number))
        if not self._streams and self.is_open:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_seconds, self.close)

    def close(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._connection.close()

    def _give_out_and_rest(self, lines: list[bytes]) -> Pause | None:
        """As `_give_out`; what comes while others have their turn is given out together."""
        began = time.monotonic()
        self._give_out(lines)
        took = time.monotonic() - began
        return partial(asyncio.sleep, min(took, LONGEST_REST_SECONDS)) if took > SHORT_SECONDS else None

    async def _relay(self) -> None:
        why = ENDED
        try:
            await self._connection.relay(self._give_out_and_rest, math.inf)
        except ConnectionBrokenError as error:
            why = str(error)
        except ValueError:
            logger.warning("an engine sent a line without a stream's number")
            why = NOT_READ
        finally:
            self.close()
            self._on_end(self)
            for stream in tuple(self._streams.values()):
                stream.broke(why)

    def _give_out(self, lines: list[bytes]) -> None:
        """Raises ValueError for a line without a number."""
        of_streams: dict[bytes, list[bytes]] = {}
        for line in lines:
            number, _, event = line.partition(b" ")
            if (events := of_streams.get(number)) is None:
                of_streams[number] = [event]
            else:
                events.append(event)
        for number, events in of_streams.items():
            if (stream := self._streams.get(int(number))) is not None:
                stream.bring(events)
