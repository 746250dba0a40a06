"""One HTTP/1.1 exchange with an engine on a connection of its own: a request, a status, then lines as they come.

Written on a bare protocol because every token passes here. The connection's end is the request's end: `close` aborts
what the engine still generates. One whose answer has come to its end may be used again (`begin`), which spares both
sides a connection for each request. A request's body may also be left open, to be gone on with line by line
(`post_openly`, `send`), while the answer comes: a connection that many streams share is made of one of these.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Final, cast

import httptools

from stageline_gateway.engine_client.incoming_lines import BROKE, ConnectionBrokenError, IncomingLines

LINE_LIMIT_BYTES: Final = 8 * 1024 * 1024
_HEX_DIGITS: Final = b"0123456789abcdefABCDEF"
UNACKNOWLEDGED_SECONDS: Final = 10.0
"""Longer than an engine that works leaves sent bytes unacknowledged, or its end of the connection full."""


class EngineConnection(IncomingLines, asyncio.Protocol):
    """Call `post` or `get`, await `head`, then `relay`, or `line` until it returns None; `close` in any case."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._end_poll: select.poll | None = None
        """Says whether the engine has ended a connection of which all may be left unread."""
        self._reads_nothing = False
        self.on_free: Callable[[], None] | None = None
        """Called when an answer nobody waits for any more has come to its end, or with it the connection."""
        super().__init__()

    def begin(self) -> None:
        """Forget the last exchange."""
        super().begin()
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._rest: list[bytes] = []
        """Of a line whose end hasn't come."""
        self._rest_bytes = 0
        self._has_head = self._may_stay = self._says_more = self._is_between_chunks = False

    @property
    def is_open(self) -> bool:
        if self._transport is None or self._transport.is_closing():
            return False
        # Where nothing is read, nobody hears of the engine's end; what is written behind it ends the connection, with
        # all that is still to be read.
        return not self._reads_nothing or self._end_poll is None or not self._end_poll.poll(0)

    @property
    def is_complete(self) -> bool:
        """Whether its answer has come to its end."""
        return self._is_complete

    @property
    def is_free(self) -> bool:
        """Whether its answer has come to its end, and the engine takes another request on it."""
        transport = self._transport
        is_used_up = not self._is_complete or not self._may_stay or self._is_held
        return not is_used_up and transport is not None and self.is_open and not transport.get_write_buffer_size()

    # Towards the reader

    def post(self, host: str, path: str, body: bytes, authorization: str = "") -> None:
        """Send the request; `authorization` is the value of that header, if any."""
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._write(_head("POST", host, path, length, authorization) + body)

    def get(self, host: str, path: str, authorization: str = "") -> None:
        """As `post`, without a body."""
        self._write(_head("GET", host, path, "", authorization))

    def post_openly(self, host: str, path: str, authorization: str = "") -> None:
        """Send the request's head; its body are the lines that `send` is given, and it has no end of its own."""
        length = "content-type: application/json\r\ntransfer-encoding: chunked\r\n"
        self._write(_head("POST", host, path, length, authorization))

    def send(self, lines: bytes) -> None:
        """Go on with a body that was left open."""
        self._write(b"%x\r\n%b\r\n" % (len(lines), lines))

    @property
    def unsent_bytes(self) -> int:
        """That the engine's machine has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def head(self, limit_seconds: float) -> int:
        while not self._has_head:
            await self._arrival(limit_seconds)
        return self.status

    async def body(self, limit_seconds: float) -> bytes:
        lines: list[bytes] = []
        while (line := await self.line(limit_seconds)) is not None:
            lines.append(line)
        return b"\n".join(lines)

    async def read_nothing_for(self, seconds: float) -> None:
        """Leave what comes meanwhile to the kernel: it costs one read then, in place of many.

        By TLS, where an end throws away what was read before it and not given out, it is read as ever.
        """
        if self._end_poll is None:
            await asyncio.sleep(seconds)
            return
        self._reads_nothing = True
        self._hold()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._reads_nothing = False
            if not self._is_held:  # else a slow reader holds it, and has it go on
                self._go_on()

    def rest(self, on_end: Callable[[], None]) -> None:
        """Wait for the next `begin`; `on_end` is called when the engine ends that, or says something."""
        self.on_free = on_end
        self._disarm()

    def close(self) -> None:
        """Break the connection, unless it has ended; an engine that still generates stops."""
        self._disarm()
        if self._transport is not None:
            self._transport.abort()

    def _write(self, content: bytes) -> None:
        assert self._transport is not None, "not connected"
        self._transport.write(content)

    def _hold(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def _go_on(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _tell_free(self) -> None:
        if self.on_free is not None:
            self.on_free()

    # From the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._end_poll = _end_poll(transport)
        # A machine that vanished acknowledges nothing: without this, a request to it would wait until discovery knew.
        if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, option, round(1e3 * UNACKNOWLEDGED_SECONDS))

    def data_received(self, data: bytes) -> None:
        lines = _only_lines(data) if self._is_between_chunks and not self._rest_bytes else None
        if lines is None:
            self._parse(data)
            lines, self._lines = self._lines, []
        # Else the parser is left where it is: between two chunks.
        if self._take is not None and lines and not self._is_complete:
            self.bring(lines, self._loop.time())
            return
        self._lines += [line for line in lines if line]
        self._heard()
        self._arrived()
        if self._has_head and self._take is None:
            self._wake()
        if self._is_complete:
            self._tell_free()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ConnectionBrokenError("What answers at the engine's address does not speak HTTP."))
            self.close()
            self._is_between_chunks = False
        # A size of which only the beginning has come is known to nobody but the parser.
        self._is_between_chunks = self._is_between_chunks and not self._is_complete and data.endswith(b"\r\n")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._transport = None
        del self._parser  # it holds this, which would wait for the garbage collector
        self._fail(ConnectionBrokenError(BROKE))
        self._tell_free()

    # From the parser

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._says_more = True  # nobody asked for another answer

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_body(self, chunk: bytes) -> None:
        if b"\n" not in chunk:
            self._rest.append(chunk)
            self._rest_bytes += len(chunk)
        else:
            lines = (b"".join((*self._rest, chunk)) if self._rest_bytes else chunk).split(b"\n")
            self._rest = [lines.pop()]
            self._rest_bytes = len(self._rest[0])
            self._lines += [line for line in lines if line and not line.isspace()]
        if self._rest_bytes > LINE_LIMIT_BYTES:
            self._rest.clear()
            self._fail(ConnectionBrokenError("The engine sent an event that is too long."))

    def on_message_complete(self) -> None:
        if (rest := b"".join(self._rest)).strip():
            self._lines.append(rest)
        self._is_complete = True
        self._may_stay = self._parser.should_keep_alive() and not self._says_more


def _end_poll(transport: asyncio.BaseTransport) -> "select.poll | None":
    """Tells of the other side's end, whatever is unread before it; None by TLS, and where the system can't tell."""
    of_an_end = getattr(select, "POLLRDHUP", None)
    own = transport.get_extra_info("socket")
    if of_an_end is None or own is None or transport.get_extra_info("sslcontext") is not None:
        return None
    poll = select.poll()
    poll.register(own.fileno(), of_an_end)
    return poll


def _only_lines(data: bytes) -> list[bytes] | None:
    """The lines that `data` holds, where it is one whole chunk of whole lines: so an engine writes a step, and tokens
    wait for less where no parser is asked. None where the parser is to say."""
    size, _, rest = data.partition(b"\r\n")
    if not size or size.strip(_HEX_DIGITS) or not rest.endswith(b"\n\r\n") or int(size, 16) != len(rest) - 2:
        return None
    lines = rest[:-3].split(b"\n")
    return None if any(map(bytes.isspace, lines)) else lines


def _head(method: str, host: str, path: str, fields: str, authorization: str) -> bytes:
    if authorization:
        fields += f"authorization: {authorization}\r\n"
    return f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{fields}\r\n".encode()
