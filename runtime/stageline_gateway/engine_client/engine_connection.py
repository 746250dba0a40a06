"""One HTTP/1.1 exchange with an engine on a connection of its own: a POST, a status, then lines as they come.

Written on a bare protocol because every token of every stream passes here. `relay` hands all lines of one read to its
taker at once, in the very call that brought them: no task wakes for a token. What the taker can't take yet waits in a
short queue, and then in the engine. A wait ends when what is waited for comes, when the answer ends, when the engine
has been silent for too long, or when somebody interrupts it: never later.

The connection's end is the request's end: `close` aborts what the engine still generates. One whose answer has come to
its end may be used again (`begin`), which spares both sides a connection for each request.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final, cast

import httptools

LINE_LIMIT_BYTES: Final = 8 * 1024 * 1024
MOST_WAITING_LINES: Final = 256
"""Lines that a slow reader may leave here before the engine is made to wait."""


UNACKNOWLEDGED_SECONDS: Final = 10.0
"""Longer than an engine that works leaves sent bytes unacknowledged, or its end of the connection full."""

Pause = Callable[[], Awaitable[None]]
"""What a taker asks to be awaited before it is given more; begun only then."""
TakeLines = Callable[[list[bytes]], Pause | None]
"""Takes lines, at once."""


class ConnectionBrokenError(Exception):
    """The answer can't go on; the text is one sentence for the client."""


class SilentEngineError(Exception):
    """Nothing came for as long as was allowed."""


class EngineConnection(asyncio.Protocol):
    """Call `post`, await `head`, then `relay`, or `line` until it returns None; `close` in any case."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.on_free: Callable[[], None] | None = None
        """Called when an answer nobody waits for any more has come to its end, or with it the connection."""
        self.heard_at = float("-inf")
        """When bytes last came, by the loop's clock."""
        self.begin()

    def begin(self) -> None:
        """Forget the last exchange."""
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._lines: list[bytes] = []
        self._rest = b""
        self._has_head = self._is_complete = self._is_paused = self._is_stopped = self._may_stay = False
        self.has_heard = False
        """Whether any byte of this exchange's answer came."""
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._silent_since = self._limit_seconds = 0.0
        self._take: TakeLines | None = None
        """Takes lines while nobody waits for one."""
        self._pause: Pause | None = None
        """What its last call asked to be awaited."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_free(self) -> bool:
        """Whether its answer has come to its end, and the engine takes another request on it."""
        transport = self._transport
        is_used_up = not self._is_complete or not self._may_stay or self._is_paused
        return not is_used_up and transport is not None and self.is_open and not transport.get_write_buffer_size()

    # Towards the reader

    def post(self, host: str, path: str, body: bytes, authorization: str = "") -> None:
        """Send the request; `authorization` is the value of that header, if any."""
        assert self._transport is not None, "not connected"
        fields = f"host: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        if authorization:
            fields += f"\r\nauthorization: {authorization}"
        self._transport.write(f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)

    async def head(self, limit_seconds: float) -> int:
        while not self._has_head:
            await self._arrival(limit_seconds)
        return self.status

    async def line(self, limit_seconds: float) -> bytes | None:
        """The next line of the body that isn't blank; None at the end."""
        while not self._lines:
            if self._is_complete:
                return None
            await self._arrival(limit_seconds)
        line = self._lines.pop(0)
        self._go_on_reading()
        return line

    async def relay(self, take: TakeLines, limit_seconds: float) -> None:
        """Hand all lines to `take` as they come, until the body ends or `stop`; raises what it raises.

        `allow_silence` may change the limit meanwhile.
        """
        self._limit_seconds = limit_seconds
        while (self._lines or not self._is_complete) and not self._is_stopped:
            if self._lines:
                pause = take(self._taken_lines())
            else:
                self._take = take
                try:
                    await self._arrival(self._limit_seconds)
                finally:
                    self._take = None
                pause, self._pause = self._pause, None
            if pause is not None:
                await pause()

    def allow_silence(self, limit_seconds: float) -> None:
        """From now on, in this wait too, the engine may be silent for so long."""
        self._limit_seconds = limit_seconds
        if self._waiter is not None:
            self._arm()

    def stop(self) -> None:
        """Have `relay` return: what it handed over last is all that is wanted."""
        self._is_stopped = True

    async def body(self, limit_seconds: float) -> bytes:
        lines: list[bytes] = []
        while (line := await self.line(limit_seconds)) is not None:
            lines.append(line)
        return b"\n".join(lines)

    @property
    def silent_seconds(self) -> float:
        """How long the reader has waited for what comes next; 0 when it isn't waiting."""
        return 0.0 if self._waiter is None else self._loop.time() - self._silent_since

    @property
    def is_waited_on(self) -> bool:
        """Whether its reader waits and nothing is unread, so that an interrupt now comes before any further line."""
        return self._waiter is not None and not self._waiter.done()

    def interrupt(self, error: Exception) -> None:
        """End the reader's wait, now or at its next one, with `error`; lines that are here are still given out."""
        self._fail(error)

    def rest(self, on_end: Callable[[], None]) -> None:
        """Wait for the next `begin`; `on_end` is called when the engine ends that, or says something."""
        self.on_free = on_end
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Break the connection, unless it has ended; an engine that still generates stops."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _taken_lines(self) -> list[bytes]:
        lines, self._lines = self._lines, []
        if self._is_paused:
            self._go_on_reading()
        return lines

    def _go_on_reading(self) -> None:
        if self._is_paused and len(self._lines) < MOST_WAITING_LINES // 2:
            self._is_paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    def _hand_over(self, take: TakeLines) -> None:
        """Give what has come to the taker. Whatever it raises is raised where `relay` waits."""
        self._silent_since = self.heard_at
        if not self._lines:
            return
        try:
            self._pause = take(self._taken_lines())
        except Exception as error:
            self._end_wait(error)
        if self._pause is not None or self._is_stopped:
            self._take = None
            self._wake()

    async def _arrival(self, limit_seconds: float) -> None:
        """Wait for bytes, or for the taker's pause or the end; raises the failure that keeps them from coming."""
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        self._silent_since, self._limit_seconds = self._loop.time(), limit_seconds
        self._arm()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _arm(self) -> None:
        """Have the timer fire by the end of this wait. One that fires earlier is kept, and armed again then."""
        due = self._silent_since + self._limit_seconds
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # what came in the same turn was there in time, however late the turn
        if self.silent_seconds >= self._limit_seconds:
            self._fail(SilentEngineError())
        else:
            self._arm()

    def _tell_free(self) -> None:
        if self.on_free is not None:
            self.on_free()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._failure is None and not self._is_complete:
            self._failure = error
            self._end_wait(error)

    def _end_wait(self, error: Exception) -> None:
        """Nothing that comes after this is given out before the reader knows of it."""
        self._take = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # From the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # A machine that vanished acknowledges nothing: without this, a request to it would wait until discovery knew.
        if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, option, round(1e3 * UNACKNOWLEDGED_SECONDS))

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        self.has_heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ConnectionBrokenError("What answers at the engine's address does not speak HTTP."))
            self.close()
        if self._take is not None:
            self._hand_over(self._take)
        elif self._lines or self._is_complete or self._has_head:
            self._wake()
        if self._is_complete:
            self._wake()
            self._tell_free()
        if len(self._lines) > MOST_WAITING_LINES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._transport = None
        self._fail(ConnectionBrokenError("The connection to the engine broke."))
        self._tell_free()

    # From the parser

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._may_stay = False  # nobody asked for another answer

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, chunk: bytes) -> None:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        self._lines += [line for line in lines if line and not line.isspace()]
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._rest = b""
            self._fail(ConnectionBrokenError("The engine sent an event that is too long."))

    def on_message_complete(self) -> None:
        if self._rest.strip():
            self._lines.append(self._rest)
        self._is_complete = True
        self._may_stay = self._parser.should_keep_alive()
