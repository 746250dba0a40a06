"""One HTTP/1.1 exchange with an engine on a connection of its own: a POST, a status, then lines as they come.

Written on a bare protocol because every token of every stream passes here. What the reader doesn't take waits in a
short queue, and then in the engine. A wait ends when a line comes, when the answer ends, when the engine has been
silent for too long, or when somebody interrupts it: never later. The connection's end is the request's end.
"""

import asyncio
from collections import deque
from typing import Final, cast

import httptools

LINE_LIMIT_BYTES: Final = 8 * 1024 * 1024
MOST_WAITING_LINES: Final = 256
"""Lines that a slow reader may leave here before the engine is made to wait."""


class ConnectionBrokenError(Exception):
    """The answer can't go on; the text is one sentence for the client."""


class SilentEngineError(Exception):
    """Nothing came for as long as was allowed."""


class EngineConnection(asyncio.Protocol):
    """Call `post`, await `head`, then `line` until it returns None; `close` in any case."""

    def __init__(self) -> None:
        self.status = 0
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._has_head = self._is_complete = self._is_paused = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silent_since = self._limit_seconds = 0.0
        self.heard_at = float("-inf")
        """When bytes last came, by the loop's clock."""

    # Towards the reader

    def post(self, host: str, path: str, body: bytes, authorization: str = "") -> None:
        """Send the request; `authorization` is the value of that header, if any."""
        assert self._transport is not None, "not connected"
        fields = f"host: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
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
        line = self._lines.popleft()
        if self._is_paused and len(self._lines) < MOST_WAITING_LINES // 2:
            self._is_paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        return line

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

    def close(self) -> None:
        """Break the connection, unless it has ended; an engine that still generates stops."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _arrival(self, limit_seconds: float) -> None:
        """Wait for bytes; raises the failure that keeps them from coming."""
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

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._failure is None and not self._is_complete:
            self._failure = error
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)

    # From the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ConnectionBrokenError("What answers at the engine's address does not speak HTTP."))
            self.close()
        if self._lines or self._is_complete or self._has_head:
            self._wake()
        if len(self._lines) > MOST_WAITING_LINES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._transport = None
        self._fail(ConnectionBrokenError("The connection to the engine broke."))

    # From the parser

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._lines.extend(line for line in lines if line.strip())
        if len(self._rest) > LINE_LIMIT_BYTES:
            self._rest = b""
            self._fail(ConnectionBrokenError("The engine sent an event that is too long."))

    def on_message_complete(self) -> None:
        if self._rest.strip():
            self._lines.append(self._rest)
        self._is_complete = True
