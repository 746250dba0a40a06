"""One HTTP/1.1 exchange with an engine: a request, a status, then lines as they come.

Written on a bare protocol because every token passes here. The connection's end is the request's end: `close` aborts
what the engine still generates. A request's body may be left open, to be gone on with line by line (`post_openly`,
`send`), while the answer comes: a connection that many streams share is made of one of these.
"""

import asyncio
import socket
from typing import Final, cast

import httptools

from stageline_gateway.engine_client.incoming_lines import BROKE, ConnectionBrokenError, IncomingLines

LINE_LIMIT_BYTES: Final = 8 * 1024 * 1024
UNACKNOWLEDGED_SECONDS: Final = 10.0
"""Longer than an engine that works leaves sent bytes unacknowledged, or its end of the connection full."""


class EngineConnection(IncomingLines, asyncio.Protocol):
    """Call `get` or `post_openly`, await `head`, then `relay`, or `line` until it returns None; `close` in any case."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        super().__init__()
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._rest: list[bytes] = []
        """Of an incomplete line."""
        self._rest_bytes = 0
        self._has_head = False
        self._parsed: list[bytes] = []
        """Whole lines, until they are brought."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # Towards the reader

    def get(self, host: str, path: str, authorization: str = "") -> None:
        """Send the request; `authorization` is the value of that header, if any."""
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

    # From the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # A machine that vanished acknowledges nothing: without this, a request to it would wait until discovery knew.
        if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:
            own = transport.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, option, round(1e3 * UNACKNOWLEDGED_SECONDS))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(ConnectionBrokenError("What answers at the engine's address does not speak HTTP."))
            self.close()
        lines, self._parsed = self._parsed, []
        self.bring(lines, self._loop.time())
        if self._has_head and self._take is None:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self._transport = None
        del self._parser  # it holds this, which would wait for the garbage collector
        self._fail(ConnectionBrokenError(BROKE))

    # From the parser

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = True

    def on_body(self, chunk: bytes) -> None:
        if b"\n" not in chunk:
            self._rest.append(chunk)
            self._rest_bytes += len(chunk)
        else:
            lines = (b"".join((*self._rest, chunk)) if self._rest_bytes else chunk).split(b"\n")
            self._rest = [lines.pop()]
            self._rest_bytes = len(self._rest[0])
            self._parsed += [line for line in lines if not line.isspace()]
        if self._rest_bytes > LINE_LIMIT_BYTES:
            self._rest.clear()
            self._fail(ConnectionBrokenError("The engine sent an event that is too long."))

    def on_message_complete(self) -> None:
        if (rest := b"".join(self._rest)).strip():
            self._parsed.append(rest)
        self._is_complete = True


def _head(method: str, host: str, path: str, fields: str, authorization: str) -> bytes:
    if authorization:
        fields += f"authorization: {authorization}\r\n"
    return f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{fields}\r\n".encode()
