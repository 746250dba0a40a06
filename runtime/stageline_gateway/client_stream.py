"""The way of an answer to its client, without a task of its own: what is written at once, and who hears of the end.

A handler of ASGI hears that its client left by a message that something must wait for, and each of its messages is a
coroutine. Every token is one, so here they are calls: `ClientStream` hands what it is given to uvicorn's own cycle of
request and response, at once wherever nothing would have to be awaited, and has a callback for a client that left. It
never writes past a client that leaves its end full: what it returns then is to be awaited first.

The server makes it and the endpoints write to it, so it belongs to neither room.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

CLIENT_EXTENSION: Final = "stageline.client"
"""Name in an ASGI scope's `extensions` of a weak reference to its `ClientStream`. The connection has the stream itself:
one that its own scope holds would be left to the garbage collector, with all that its connection was."""

_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding", b"connection"})
"""Headers from which uvicorn takes how an answer is framed."""
_CONTROLS: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""That no header holds, besides the end of a line."""

_NO_LENGTH: Final = 2**62

Pause = Callable[[], Awaitable[None]]
"""What is to be awaited before more is written; begun only then."""


class ClientStream:
    """One request's answer on its connection."""

    __slots__ = (
        "__weakref__",
        "_cycle",
        "_ends_with_connection",
        "_flow",
        "_streams_to",
        "has_written",
        "is_slow",
        "on_gone",
    )

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._streams_to: asyncio.Transport | None = None
        """Where pieces of an open stream are written to, as long as its client is there."""
        self.is_slow = False
        """Its client has left its end full for too long, and it was dropped for that."""
        self.on_gone: Callable[[], None] | None = None
        self.has_written = False
        """Whether anything was written since whoever reads this set it back."""
        self._ends_with_connection = False
        """Its client knows neither the length of the answer nor chunks: HTTP/1.0."""

    @property
    def is_gone(self) -> bool:
        return self._cycle.disconnected

    def take_body(self) -> bytearray | None:
        """The request's body, to be taken once; None where it is still to come, or its client has left."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        # What uvicorn does where the body is received, but for its copy.
        cycle.flow.resume_reading()
        cycle.message_event.clear()
        body, cycle.body = cycle.body, bytearray()
        return body

    @property
    def has_begun(self) -> bool:
        """Whether a status has been written."""
        return self._cycle.response_started

    @property
    def is_complete(self) -> bool:
        return self._cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether the answer goes on, and nothing waits to be written to it."""
        return not (self._cycle.response_complete or self._cycle.disconnected or self._flow.write_paused)

    def add_headers(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Have the answer begin with these too, whoever writes it."""
        self._cycle.default_headers = [*self._cycle.default_headers, *headers]

    def gone(self) -> None:
        """The connection is lost. uvicorn tells only the last request that came on it."""
        self._streams_to = None
        if not self._cycle.response_complete:
            self._cycle.disconnected = True
            self._cycle.message_event.set()
        if self.on_gone is not None:
            self.on_gone()

    def open(self, headers: Sequence[tuple[bytes, bytes]], body: bytes, more: bool = True) -> Pause | None:
        """Begin an answer with status 200; without `more` it is all of it. Names of headers are in lower case."""
        cycle = self._cycle
        self.has_written = True
        if cycle.scope["http_version"] == "1.0" and all(name != b"content-length" for name, _ in headers):
            self._end_with_connection()
        is_held_up = cycle.response_started or cycle.flow.write_paused or cycle.disconnected
        head = _stream_head(cycle, headers) if more and not is_held_up and not cycle.access_log else None
        if head is not None:
            cycle.response_started = cycle.chunked_encoding = True
            cycle.waiting_for_100_continue = False
            self._streams_to = cycle.transport
            cycle.transport.write(b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head)
            return None
        begin = {"type": "http.response.start", "status": 200, "headers": headers}
        return self._send([begin, _piece(body, more)] if body or not more else [begin])

    def write(self, body: bytes, more: bool = True) -> Pause | None:
        """One piece of a stream that is open."""
        self.has_written = True
        if (transport := self._streams_to) is not None and more and body and not self._flow.write_paused:
            # What uvicorn would do; the check of the order of messages is left out.
            transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return None
        is_open = more and self._cycle.chunked_encoding and not self._cycle.disconnected
        self._streams_to = self._cycle.transport if is_open else None  # uvicorn may have opened it
        return self._send([_piece(body, more)])

    async def taken(self) -> None:
        """Wait until the client has taken what was written, but for what a connection may always hold."""
        if self._cycle.flow.write_paused and not self._cycle.disconnected:
            await self._cycle.flow.drain()

    def _send(self, messages: Sequence[dict[str, Any]]) -> Pause | None:
        if self._cycle.flow.write_paused:
            return partial(self._send_when_written, messages)
        for message in messages:
            self._fit_length(message)
            _finish(self._cycle.send(message))  # type: ignore[arg-type]
        return None

    async def _send_when_written(self, messages: Sequence[dict[str, Any]]) -> None:
        for message in messages:
            self._fit_length(message)
            await self._cycle.send(message)  # type: ignore[arg-type]

    def _end_with_connection(self) -> None:
        """uvicorn frames an answer by its length, or in chunks, which HTTP/1.0 doesn't have. So it is told of a length
        that is never reached, and nothing of that to the client."""
        self._ends_with_connection = True
        self._cycle.chunked_encoding, self._cycle.expected_content_length = False, _NO_LENGTH

    def _fit_length(self, message: dict[str, Any]) -> None:
        """The answer is as long as it has become by its last piece."""
        if self._ends_with_connection and not message.get("more_body", True):
            self._cycle.expected_content_length = len(message["body"])


def _stream_head(cycle: RequestResponseCycle, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """What uvicorn would write of the begin of a stream, in one piece; None where it would do more than write it.

    Names of headers are this gateway's own words, and are not looked at; values may be a client's.
    """
    if (
        cycle.scope["http_version"] == "1.0"
        or cycle.scope["method"] == "HEAD"
        or any(name in _LENGTHS for name, _ in headers)
    ):
        return None
    lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)]
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    head = b"".join(lines)
    # One mark for each line: no value has one of its own.
    is_clean = head.count(b"\n") == head.count(b"\r") == len(lines) and not _CONTROLS.search(head)
    return b"%b%btransfer-encoding: chunked\r\n\r\n" % (STATUS_LINE[200], head) if is_clean else None


def _piece(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Run what has nothing to wait for. Raises what it raises."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError("a message to a client that could be written had to wait")


def client_of(scope: Scope) -> ClientStream:
    """The client of a request that `server.http_protocol` took."""
    client = scope["extensions"][CLIENT_EXTENSION]()
    assert isinstance(client, ClientStream), client
    return client


class Ending(Enum):
    """What ended `run_while_connected`."""

    FINISHED = "finished"
    CLIENT_GONE = "client gone"
    CUT = "cut"


class Cut:
    """Ends all open answers when it is set. For one event loop, and its thread."""

    def __init__(self) -> None:
        self.is_set = False
        self._open: dict[Callable[[], None], None] = {}

    def set(self) -> None:
        self.is_set = True
        for end in tuple(self._open):
            end()

    def add(self, end: Callable[[], None]) -> None:
        self._open[end] = None

    def remove(self, end: Callable[[], None]) -> None:
        del self._open[end]


async def run_while_connected(work: Coroutine[Any, Any, None], client: ClientStream, cut: Cut) -> Ending:
    """Run `work` to its end unless the client leaves or `cut` is set first. Raises what `work` raises.

    Whatever ends first decides: a request never outlives its client.
    """
    if client.is_gone or cut.is_set:
        work.close()
        return Ending.CLIENT_GONE if client.is_gone else Ending.CUT
    task = asyncio.current_task()
    assert task is not None
    endings: list[Ending] = []

    def end(ending: Ending) -> None:
        if not endings:
            task.cancel()
        endings.append(ending)

    client.on_gone, cut_off = partial(end, Ending.CLIENT_GONE), partial(end, Ending.CUT)
    cut.add(cut_off)
    try:
        await work
    except asyncio.CancelledError:
        # As `asyncio.timeout` does it: whoever else cancels the task is to have it end.
        if not endings or task.uncancel() > 0:
            raise
        return endings[0]
    finally:
        client.on_gone = None
        cut.remove(cut_off)
    return Ending.FINISHED
