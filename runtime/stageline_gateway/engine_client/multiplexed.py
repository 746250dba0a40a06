"""One connection to an engine that many answers share (`stageline_api.multiplexing`).

It is usable at once: requests made while it opens are sent when it is open, and their callers wait as on any answer, so
each can leave independently. The lines of one read are delivered by stream, all lines of a stream at once, in the call
that read them. So the tokens of a step cost one read for any number of streams. Data that arrives while the gateway is
busy waits in the kernel, and is written to clients in fewer, larger chunks.

A stream with a slow reader is held in the engine; the others continue. The connection's end ends all its streams, and
each stream's waiter gets the error. Lines of a stream without a reader are dropped, and a line without a valid stream
ends the connection. A connection that received nothing at all while a request waited accepts no more requests. It ends
with its last one.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final

from stageline_api.multiplexing import MULTIPLEXED_PATH, ClientLine, UnreadableLineError, Word, stream_number
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.incoming_lines import BROKE, ConnectionBrokenError, IncomingLines

logger = logging.getLogger(__name__)

HTTP_OK: Final = 200
MOST_WAITING_LINES: Final = 16384
"""Of all streams; each of them holds far fewer itself."""
MOST_UNSENT_BYTES: Final = 1024 * 1024
"""Of requests that the engine has not read yet: with more, the next opens another connection. What is asked while the
connection opens isn't counted, and goes out at once then: a burst with a connection each would come before it."""
UNREADABLE: Final = "The engine sent a line that can't be read."

Connect = Callable[[], Awaitable[EngineConnection]]
"""Raises OSError or ValueError when there is no connection to be had."""


class NotConnectedError(Exception):
    """There is no connection to be had."""


class NotOpenedError(Exception):
    """The engine did not open the connection; what it said instead."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class MultiplexedStream(IncomingLines):
    """One answer on a shared connection: `ask`, then `relay`; `close` in any case."""

    def __init__(self, connection: "MultiplexedConnection", number: int, *, may_be_stale: bool) -> None:
        super().__init__()
        self._connection = connection
        self._number = number
        self.asked_at = math.inf
        """When its request went out."""
        self.may_be_stale = may_be_stale
        """Whether the request may have been sent on a connection that had already ended: one that was idle and has
        received nothing since, or that its engine closed."""

    def ask(self, request: bytes) -> None:
        """Have the engine generate what `request`, a `GenerateRequest` as JSON, asks for."""
        self._connection.open(self, ClientLine(Word.OPEN, self._number, request))

    def broke(self, error: Exception) -> None:
        """Nothing more comes."""
        self._fail(error)

    @property
    def hears_of_end(self) -> bool:
        """Whether the connection's end is a loss to it, as far as is known: it waits, and is not sent again."""
        return self.is_waited_on and (self.has_heard or not self.may_be_stale)

    def doubt(self) -> None:
        """The engine was lost. Where its silence was why, and others heard nothing either, the connection may be."""
        if self._failure is not None and self._connection.heard_at <= max(self.asked_at, self.heard_at):
            self._connection.retire()

    def close(self, *, is_over: bool) -> None:
        """The reader leaves. Unless the engine reported that the stream `is_over`, the engine is asked to stop."""
        self._disarm()
        self.forget_failure()
        self._connection.leave(self._number, is_over)

    def _hold(self) -> None:
        self._connection.say(ClientLine(Word.HOLD, self._number))

    def _go_on(self) -> None:
        self._connection.say(ClientLine(Word.GO_ON, self._number))


class MultiplexedConnection:
    """Has as many `stream`s as are wanted while it `is_open`; `close` ends them all."""

    def __init__(
        self,
        connect: Connect,
        host: str,
        authorization: str,
        idle_seconds: float,
        on_end: Callable[["MultiplexedConnection"], None],
    ) -> None:
        """It closes itself when it has had no stream for `idle_seconds`; `on_end` is called when no more can be had."""
        self._idle_seconds = idle_seconds
        self._on_end = on_end
        self._streams: dict[bytes, MultiplexedStream] = {}
        """By number, as written on the wire: each number has one spelling."""
        self._next = 0
        self._unsent: dict[int, ClientLine] | None = {}
        """What is asked while it opens; None once it is open."""
        self._has_rested = self._is_retired = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._connection: EngineConnection | None = None
        self._ended: Exception = ConnectionBrokenError(BROKE)
        """How, once it has, where nothing better is known."""
        self._life = asyncio.create_task(self._live(connect, host, authorization))
        self._life.add_done_callback(self._end)  # where it is cancelled before it began, too

    @property
    def is_open(self) -> bool:
        """Whether it takes more streams."""
        is_there = self._connection is None or self._connection.is_open
        return is_there and not self._is_retired and not self._life.done()

    @property
    def has_room(self) -> bool:
        return self._connection is None or self._connection.unsent_bytes < MOST_UNSENT_BYTES

    @property
    def heard_at(self) -> float:
        return float("-inf") if self._connection is None else self._connection.heard_at

    def stream(self) -> MultiplexedStream:
        # Not `is_open`: the engine may have ended it since its caller asked, and its streams get the error.
        is_over = self._is_retired or self._life.done()
        assert not is_over, "a stream of a connection that takes none"
        self._end_rest()
        number, self._next = self._next, self._next + 1
        stream = self._streams[b"%d" % number] = MultiplexedStream(self, number, may_be_stale=self._has_rested)
        return stream

    def open(self, stream: MultiplexedStream, line: ClientLine) -> None:
        """Ask for a stream, now or as soon as there is a connection."""
        if self._unsent is None:
            stream.asked_at = asyncio.get_running_loop().time()
            self.say(line)
        else:
            self._unsent[line.stream] = line

    def say(self, line: ClientLine) -> None:
        if self._connection is not None and self._connection.is_open:  # else its streams are about to get the error
            self._connection.send(line.written())

    def leave(self, number: int, is_over: bool) -> None:
        """Forget a stream."""
        if self._streams.pop(b"%d" % number, None) is None:
            return
        if self._unsent is not None:
            self._unsent.pop(number, None)
        elif not is_over:
            self.say(ClientLine(Word.CLOSE, number))
        if self._streams:
            return
        if self._is_retired:
            self.close()
        elif not self._life.done():
            self._has_rested = True
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_seconds, self.close)

    def retire(self) -> None:
        """Take no more streams."""
        self._is_retired = True
        self._on_end(self)

    def close(self) -> None:
        self._end_rest()
        if self._connection is None:
            self._life.cancel()
        else:
            self._connection.close()

    def _end_rest(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    async def _live(self, connect: Connect, host: str, authorization: str) -> None:
        """From the first byte to the last."""
        try:
            connection = await self._opened(connect, host, authorization)
            await connection.relay(self._give_out, math.inf)
            for stream in self._streams.values():
                stream.may_be_stale = True  # what it asked may have crossed this end, which the engine chose
        except (OSError, ValueError, NotOpenedError, ConnectionBrokenError) as error:
            self._ended = error.with_traceback(None)
        except Exception as error:  # a bug; no caller awaits this task
            logger.exception("a bug in the gateway: %s", type(error).__name__)

    async def _opened(self, connect: Connect, host: str, authorization: str) -> EngineConnection:
        self._connection = connection = await connect()
        connection.most_waiting = MOST_WAITING_LINES
        connection.post_openly(host, MULTIPLEXED_PATH, authorization)
        if (status := await connection.head(math.inf)) != HTTP_OK:
            raise NotOpenedError(status, await connection.body(math.inf))
        unsent, self._unsent = self._unsent or {}, None
        for number, line in unsent.items():
            self.open(self._streams[b"%d" % number], line)
        return connection

    def _end(self, _: asyncio.Task[None]) -> None:
        """Raise the connection's end in all its streams."""
        self._is_retired = True
        self._end_rest()
        if self._connection is not None:
            self._connection.close()
        self._on_end(self)
        if isinstance(self._ended, UnreadableLineError):
            logger.warning("an engine sent a line without a stream's number")
        # Streams with a waiter first: the first one's loss counts as its engine's failure, the others' are echoes.
        streams = sorted(self._streams.values(), key=lambda one: not one.hears_of_end)
        for place, stream in enumerate(streams):
            stream.broke(_told(self._ended, is_echo=place > 0))

    def _give_out(self, lines: list[bytes]) -> None:
        """Give each stream its lines. Raises UnreadableLineError for a line without a stream's number."""
        self._has_rested = False
        of_streams: dict[bytes, list[bytes]] = {}
        for line in lines:
            number, _, event = line.partition(b" ")
            of_streams.setdefault(number, []).append(event)
        at = self.heard_at
        for number, events in of_streams.items():
            if (stream := self._streams.get(number)) is not None:
                stream.bring(events, at)
            else:
                stream_number(number)  # of a stream without a reader, if it is a number


def _told(ended: Exception, *, is_echo: bool) -> Exception:
    """The error that a stream gets when its connection ends; each stream raises its own."""
    match ended:
        case NotOpenedError(status=status, body=body):
            return NotOpenedError(status, body)
        case UnreadableLineError():
            return ConnectionBrokenError(UNREADABLE, is_echo)
        case OSError() | ValueError():
            return NotConnectedError()
        case _:
            return ConnectionBrokenError(str(ended), is_echo)
