"""The server side of one HTTP connection: uvicorn's, but each request gets exactly one response, in order.

`Upgrade` is ignored (RFC 9110, 7.8): the request is parsed by its `Content-Length` or its chunks like any other. The
connection itself refuses bytes that are no request. That refusal waits until the preceding responses are complete, then
closes the connection. It is omitted if its request has a response already.

The gateway and the engine use this. No other part imports it, because it needs httptools and uvicorn.
"""

from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_DISCARDED_BYTES: Final = 128 * 1024
"""Limit on the bytes that a refused client sends before the refusal is written."""
_BAD_REQUEST: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%b"
)


class RequestParser:
    """httptools' parser for one protocol, without upgrades.

    httptools leaves the body of a request with `Upgrade` to another protocol. So a new parser gets such a request's
    headers without that field, and then the body: callbacks see `on_message_begin` and the headers twice.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self.on_message_begin = protocol.on_message_begin
        self.on_url = protocol.on_url
        self.on_header = protocol.on_header
        self.on_body = protocol.on_body
        self._begin()

    def _begin(self) -> None:
        self._parser = parser = httptools.HttpRequestParser(self)
        # uvicorn sets it too: respond to the first of several requests although it asks to close the connection.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.get_method, self.get_http_version = parser.get_method, parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive

    def end(self) -> None:
        """Release the protocol, which would otherwise wait for the garbage collector."""
        self.__dict__.clear()

    def should_upgrade(self) -> bool:
        return False

    def on_headers_complete(self) -> None:
        if self._parser.get_method() == b"CONNECT":
            raise ValueError("CONNECT tunnels are not supported")
        if not self._parser.should_upgrade():
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()

    def feed_data(self, data: bytes) -> None:
        """Raises HttpParserError."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
            else:
                return
            head = self._head_without_offer()
            self._begin()
            self._parser.feed_data(head)

    def _head_without_offer(self) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._protocol.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self._protocol.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])


class HttpConnection(HttpToolsProtocol):
    """One connection. Subclasses refuse only with `refuse_with` and never write to the transport themselves."""

    _current: RequestResponseCycle | None = None
    """The request that waits for its response, or the last one that got it."""
    _due_refusal: bytes | None = None
    """Written after the pending responses."""
    _is_refused = False
    _discarded_bytes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._requests = RequestParser(self)
        self.parser = self._requests  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._requests.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
            return
        self._discarded_bytes += len(data)
        if self._discarded_bytes > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it for bytes that are not HTTP."""
        self.refuse_with(_BAD_REQUEST % (len(msg), msg.encode()))

    def refuse_with(self, answer: bytes) -> None:
        """Respond to the last request with these bytes, after the pending responses, then close. Further input is
        ignored.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        broken = self._request_being_received()
        if broken is not None and broken.response_started:
            if broken.response_complete:
                self.transport.close()
            else:
                self.transport.abort()
            return
        if broken is not None:
            self._abandon(broken)
        self._due_refusal = answer
        self._refuse_if_in_turn()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._refuse_if_in_turn()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def _request_being_received(self) -> RequestResponseCycle | None:
        return self.cycle if self.cycle is not None and self.cycle.more_body else None

    def _abandon(self, broken: RequestResponseCycle) -> None:
        """Prevent any response of the application to this request, which has an unreadable body."""
        if broken is self._current:
            self._current = None
            broken.disconnected = True
            broken.message_event.set()
        else:
            self.pipeline.popleft()  # the newest one

    def _refuse_if_in_turn(self) -> None:
        is_answering = self._current is not None and not self._current.response_complete
        if self._due_refusal is None or is_answering or self.transport.is_closing():
            return
        self.transport.write(self._due_refusal)
        self.transport.close()
