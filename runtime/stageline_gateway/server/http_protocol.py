"""The server's side of one client's connection, with bounds on it.

Connections are bounded in number, headers in bytes and in time, pipelined requests in number, and every write in time:
a client that doesn't read is dropped. The parser's internal buffers are bounded, in trailers as in headers. So is data
after an answer that starts no request: it keeps no connection alive. At the connection limit, a new connection replaces
the one that has been idle longest. Bytes that aren't HTTP are answered in JSON. A request's scope holds its
`ClientStream`.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, cast
from weakref import ref

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import is_ssl

from stageline_api.engine_access import is_of_this_machine
from stageline_api.http_connection import HttpConnection
from stageline_gateway.client_stream import CLIENT_EXTENSION, ClientStream
from stageline_gateway.errors import ApiError

HEADER_LIMIT_BYTES: Final = 32 * 1024
"""Request line and headers together."""
HEADER_TIMEOUT_SECONDS: Final = 15.0
"""From a connection's opening, or a request's first byte, to the end of the request's headers."""
REST_SECONDS: Final = 30.0
"""From the first bytes that follow an answer to the end of the answered request, or to the next one's begin."""
IDLE_SECONDS: Final = 75
"""How long a connection may stay without a request. Longer than clients and load balancers keep theirs (httpx and the
SDKs over it 5 s, many balancers 60 s), so that they let go first and send no request into a connection that is closing.
"""
MOST_SENT_AHEAD: Final = 16
"""Requests that may wait on a connection for the answer to the one before."""
MOST_PIECES: Final = 64 * 1024
"""Of one body. One that comes in chunks of a byte takes a thousand times as long to read as in large ones."""


_NOT_HTTP: Final = ApiError(400, "The request is not valid HTTP.", code="invalid_http")
_TOO_LARGE: Final = ApiError(431, f"The request's headers exceed {HEADER_LIMIT_BYTES} bytes.", code="headers_too_large")
_TOO_SLOW: Final = ApiError(
    408, f"The request's headers did not arrive within {HEADER_TIMEOUT_SECONDS:g} s.", code="headers_timeout"
)
_NOTHING_MORE: Final = ApiError(
    408, f"What was sent after an answer was no whole request within {REST_SECONDS:g} s.", code="rest_timeout"
)
_TOO_MUCH_AHEAD: Final = ApiError(
    400, f"More than {MOST_SENT_AHEAD} requests wait on this connection for an answer.", code="too_many_pipelined"
)
_IN_CRUMBS: Final = ApiError(
    400, f"The request's body comes in more than {MOST_PIECES} pieces.", code="too_many_chunks"
)
_TOO_MANY: Final = ApiError(
    503, "This gateway has as many connections as it takes.", "server_error", code="overloaded", retry_after_seconds=2.0
)
_FOREIGN_HOST: Final = ApiError(
    421,
    "This gateway asks for no key, so it answers to addresses and to this machine's own names alone; "
    "--allowed-host gives it others.",
    code="foreign_host",
)
_REASONS: Final = {
    400: "Bad Request", 408: "Request Timeout", 421: "Misdirected Request", 431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}  # fmt: skip


@lru_cache(maxsize=1024)
def _is_ours(host: bytes, hosts: frozenset[str]) -> bool:
    """Whether no web page could have a browser send this `Host` because its owner pointed a name of theirs here."""
    text = host.decode("latin-1").lower()
    return is_of_this_machine(text) or text.partition(":")[0] in hosts


class BoundedConfig(uvicorn.Config):
    """uvicorn's configuration, with the number of connections that may be open.

    Not uvicorn's own `limit_concurrency`, which answers in plain text and lets connections without a request pile up.
    """

    connection_limit: int = 8192
    """Clients' connections that may be open at once."""
    send_timeout_seconds: float = 60.0
    """How long a client may leave its end of a connection full."""
    hosts: frozenset[str] | None = None
    """Names that may be asked for, besides addresses and this machine's own; None: any."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        # No header identifies the client: no decision depends on an address, and a log shows the connecting one.
        super().__init__(app, timeout_keep_alive=IDLE_SECONDS, proxy_headers=False, **options)
        self.direct_posts: Mapping[str, ASGIApp] = {}
        """What answers a POST before the application is asked, by its path."""
        self.idle: dict[GatewayProtocol, None] = {}
        """Connections that have sent all answers and have no open request, in the order in which they became idle."""

    def make_room(self) -> bool:
        """Drop the connection that has been idle longest; whether there was one."""
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        del self.idle[oldest]
        oldest.transport.abort()
        return True


class GatewayProtocol(HttpConnection):
    _header_bytes = 0
    _untold_bytes = 0
    """Bytes received since the parser reported a request's start, headers or body: it buffers or discards them."""
    _pieces = 0
    """Of the body that comes."""
    _refusal: ApiError | None = None
    _awaited: tuple[float, ApiError] | None = None
    """Until when, by the loop's clock, something has to come, and how the connection is refused otherwise."""
    _header_timer: asyncio.TimerHandle | None = None
    """Fires by then, or earlier."""
    _write_timer: asyncio.TimerHandle | None = None
    _client: ClientStream | None = None
    """Of the request that is being answered."""
    on_lost: Callable[[], None] | None = None
    """Called when the connection is gone."""

    @property
    def _bounds(self) -> BoundedConfig:
        return cast(BoundedConfig, self.config)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # In place of uvicorn's, which makes a socket's object twice to ask for addresses that the transport knows.
        self.connections.add(self)
        self.transport = transport
        self.flow = FlowControl(transport)
        self.server, self.client = (_address(transport, name) for name in ("sockname", "peername"))
        self.scheme = "https" if is_ssl(transport) else "http"
        self._await_headers()
        config = self._bounds
        if len(self.connections) > config.connection_limit and not config.make_room():
            self._refuse(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.idle.pop(self, None)
        self._headers_came()
        self._stop_waiting()
        self._written()
        super().connection_lost(exc)
        if self.pipeline:  # unanswered requests; each refers to this object
            self.pipeline.clear()
            self.cycle = None  # type: ignore[assignment]
        if self._client is not None:
            self._client.gone()
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_written()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._written()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None and not self.transport.is_closing():
            self._bounds.idle[self] = None
        self._await_end()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_end()

    def shutdown(self) -> None:
        super().shutdown()
        self._await_end()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._untold_bytes = self._pieces = 0
        if len(self.pipeline) >= MOST_SENT_AHEAD:
            self._refusal = _TOO_MUCH_AHEAD
            raise ValueError("too many requests sent ahead")
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_came()
        hosts = self._bounds.hosts
        if hosts is not None and not all(_is_ours(value, hosts) for name, value in self.headers if name == b"host"):
            self._refusal = _FOREIGN_HOST
            raise ValueError("a host of somebody else")
        self._untold_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._untold_bytes = 0
        self._pieces += 1
        if self._pieces > MOST_PIECES:
            self._refusal = _IN_CRUMBS
            raise ValueError("a body in crumbs")
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:
            # A large last chunk makes uvicorn stop reading. A sender that has nothing more to wait for would then never
            # notice a client that leaves.
            self.flow.resume_reading()
        if self.cycle.response_complete and not self.transport.is_closing():
            # It was answered before it had come. uvicorn has stopped its timer when the rest came.
            self._headers_came()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self._bounds.idle[self] = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Refuse what can't be parsed."""
        refusal, self._refusal = self._refusal or _NOT_HTTP, None
        self._refuse(refusal)

    def data_received(self, data: bytes) -> None:
        self._bounds.idle.pop(self, None)
        self._untold_bytes += len(data)
        super().data_received(data)
        if self._untold_bytes > 4 * HEADER_LIMIT_BYTES:
            self._refuse(_TOO_LARGE)
        elif self.cycle is not None and self.cycle.response_complete and self not in self._bounds.idle:
            self._await_rest()

    def _count(self, size_bytes: int) -> None:
        self._header_bytes += size_bytes
        if self._header_bytes > HEADER_LIMIT_BYTES:
            self._refusal = _TOO_LARGE
            raise ValueError("headers too large")

    def _await_headers(self) -> None:
        self._await(HEADER_TIMEOUT_SECONDS, _TOO_SLOW)

    def _await_rest(self) -> None:
        """The rest of a request that was answered early, or of data that starts no request."""
        if self._awaited is None:
            self._await(REST_SECONDS, _NOTHING_MORE)

    def _headers_came(self) -> None:
        """Nothing is awaited. The timer keeps running: stopping and starting timers would delay the first token."""
        self._awaited = None

    def _await(self, seconds: float, refusal: ApiError) -> None:
        """Refuse the connection so unless something comes in time."""
        due = self.loop.time() + seconds
        self._awaited = due, refusal
        if self._header_timer is None or self._header_timer.when() > due:
            self._stop_waiting()
            self._header_timer = self.loop.call_at(due, self._look)

    def _look(self) -> None:
        self._header_timer = None
        if self._awaited is None:
            return
        due, refusal = self._awaited
        if self.loop.time() < due:
            self._header_timer = self.loop.call_at(due, self._look)
        else:
            self._refuse(refusal)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _await_written(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._bounds.send_timeout_seconds, self._give_up)

    def _await_end(self) -> None:
        """A connection that is being closed waits for unsent data, which its client may never read."""
        if self.transport.is_closing():
            self._await_written()

    def _written(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _give_up(self) -> None:
        if self._client is not None:
            self._client.is_slow = True
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._client = ClientStream(cycle)
        extensions: dict[str, Any] = {CLIENT_EXTENSION: ref(self._client)}
        cycle.scope["extensions"] = extensions
        scope = cycle.scope
        super()._start_asgi_task(
            cycle, self._bounds.direct_posts.get(scope["path"], app) if scope["method"] == "POST" else app
        )

    def _refuse(self, refusal: ApiError) -> None:
        self._headers_came()
        self.refuse_with(_response(refusal))
        self._await_end()


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    """Host and port of one end; None where it has none."""
    address = transport.get_extra_info(name)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None


def _response(refusal: ApiError) -> bytes:
    body = json.dumps(refusal.body()).encode()
    head = (
        f"HTTP/1.1 {refusal.status} {_REASONS[refusal.status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in refusal.headers().items()) + "\r\n"
    return head.encode() + body
