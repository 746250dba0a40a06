"""The HTTP server's side of one connection: uvicorn's with bounds on it, and work that lasts as long as its client.

Connections are bounded in number, headers in bytes and in time; bytes that aren't HTTP are answered in JSON. The server
tells of a client that left by a message on `receive`, not by failing a write, so `run_while_connected` watches for it:
between two tokens nothing is written. Whatever ends first decides, and the rest is cancelled before it returns, so that
a request never outlives its client. A client that stops reading is given up after a time, and its connection dropped.
"""

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any, Final, cast

import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stageline_gateway.errors import ApiError, SlowReaderError
from stageline_gateway.server.responses import encode_json

HEADER_LIMIT_BYTES: Final = 32 * 1024
"""Request line and headers together."""
HEADER_TIMEOUT_SECONDS: Final = 15.0
"""From a connection's opening, or a request's first byte, to the end of the request's headers."""
ABORT_EXTENSION: Final = "stageline.abort"
"""Name in an ASGI scope's `extensions` of a function that drops the connection and what it holds unsent."""


class Ending(Enum):
    """What ended `run_while_connected`."""

    FINISHED = "finished"
    CLIENT_GONE = "client gone"
    CUT = "cut"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(work: Coroutine[Any, Any, None], receive: Receive, cut: asyncio.Event) -> Ending:
    """Run `work` to its end unless the client leaves or `cut` is set first. Raises what `work` raises."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    stopped = asyncio.ensure_future(cut.wait())
    everything: tuple[asyncio.Future[Any], ...] = (task, gone, stopped)
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return Ending.FINISHED
        return Ending.CLIENT_GONE if gone.done() else Ending.CUT
    finally:
        for one in everything:
            one.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


def send_within(send: Send, timeout_seconds: float) -> Send:
    """`send` that raises SlowReaderError when the client doesn't make room within `timeout_seconds`.

    The server lets a send wait while more than a fixed amount is unsent, so an answer never piles up in memory.
    """

    async def bounded(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                await send(message)
        except TimeoutError:
            raise SlowReaderError from None

    return bounded


async def abort_connection(scope: Scope, receive: Receive) -> None:
    """Drop the client's connection and wait until it is gone: closing it would wait for the client to read."""
    abort = scope.get("extensions", {}).get(ABORT_EXTENSION)
    if abort is not None:
        abort()
        await _disconnected(receive)


_NOT_HTTP: Final = ApiError(400, "The request is not valid HTTP.", code="invalid_http")
_TOO_LARGE: Final = ApiError(431, f"The request's headers exceed {HEADER_LIMIT_BYTES} bytes.", code="headers_too_large")
_TOO_SLOW: Final = ApiError(
    408, f"The request's headers did not arrive within {HEADER_TIMEOUT_SECONDS:g} s.", code="headers_timeout"
)
_TOO_MANY: Final = ApiError(
    503, "This gateway has as many connections as it takes.", "server_error", code="overloaded", retry_after_seconds=2.0
)
_REASONS: Final = {
    400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"
}  # fmt: skip


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration, with the number of connections that may be open.

    Not uvicorn's own `limit_concurrency`, which answers in plain text and lets connections without a request pile up.
    """

    connection_limit: int = 8192


class GatewayProtocol(HttpToolsProtocol):
    _header_bytes = 0
    _refusal: ApiError | None = None
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()
        if len(self.connections) > cast(BoundedConfig, self.config).connection_limit:
            self._refuse(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        extensions: dict[str, Any] = {ABORT_EXTENSION: self.transport.abort}
        self.scope["extensions"] = extensions
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_came()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Refuse what can't be parsed; an answer that is being sent can't be followed by another."""
        refusal, self._refusal = self._refusal or _NOT_HTTP, None
        self._refuse(refusal)

    def data_received(self, data: bytes) -> None:
        """Bytes of a header that has no end yet count too: the parser keeps them to itself."""
        if self._header_timer is not None:
            self._header_bytes += len(data)
            if self._header_bytes > 4 * HEADER_LIMIT_BYTES:
                self._refuse(_TOO_LARGE)
                return
        super().data_received(data)

    def _count(self, size_bytes: int) -> None:
        self._header_bytes += size_bytes
        if self._header_bytes > HEADER_LIMIT_BYTES:
            self._refusal = _TOO_LARGE
            raise ValueError("headers too large")

    def _await_headers(self) -> None:
        self._headers_came()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self._refuse, _TOO_SLOW)

    def _headers_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, refusal: ApiError) -> None:
        self._headers_came()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(_response(refusal))
            self.transport.close()


def _response(refusal: ApiError) -> bytes:
    body = encode_json(refusal.body())
    head = (
        f"HTTP/1.1 {refusal.status} {_REASONS[refusal.status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in refusal.headers().items()) + "\r\n"
    return head.encode() + body
