"""The begin of a stream, written by hand, is what uvicorn writes of it; a body is taken as uvicorn gives it."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from stageline_gateway.client_stream import ClientStream

HEADERS = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"req-1")]


class Written(asyncio.Transport):
    """Keeps what a server writes."""

    def __init__(self) -> None:
        super().__init__()
        self.content = b""
        self.writes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.content += data
        self.writes += 1

    def close(self) -> None:
        self.content += b"<closed>"

    def resume_reading(self) -> None:
        pass


def cycle(
    written: Written,
    *,
    keep_alive: bool = True,
    method: str = "POST",
    access_log: bool = False,
    expect_100_continue: bool = False,
) -> RequestResponseCycle:
    log = logging.getLogger("test")
    scope = {"type": "http", "method": method, "path": "/", "query_string": b"", "http_version": "1.1", "client": None}
    return RequestResponseCycle(
        scope=cast(Any, scope),
        transport=written,
        flow=FlowControl(written),
        logger=log,
        access_logger=log,
        access_log=access_log,
        default_headers=[(b"date", b"Thu, 26 Nov 2026 00:00:00 GMT")],
        message_event=asyncio.Event(),
        expect_100_continue=expect_100_continue,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )


async def by_uvicorn(
    one: RequestResponseCycle, headers: Sequence[tuple[bytes, bytes]], bodies: Sequence[bytes]
) -> None:
    await one.send({"type": "http.response.start", "status": 200, "headers": headers})
    for index, body in enumerate(bodies):
        more = index < len(bodies) - 1
        await one.send({"type": "http.response.body", "body": body, "more_body": more})


@pytest.mark.parametrize("keep_alive", [True, False])
def test_a_stream_is_written_as_uvicorn_writes_it_in_one_write_for_its_begin(keep_alive: bool) -> None:
    async def run() -> None:
        expected, written = Written(), Written()
        await by_uvicorn(cycle(expected, keep_alive=keep_alive), HEADERS, [b"data: 1\n\n", b"data: 2\n\n", b"end"])
        client = ClientStream(cycle(written, keep_alive=keep_alive))
        assert client.open(HEADERS, b"data: 1\n\n") is None
        assert client.has_begun
        assert written.writes == 1
        assert client.write(b"data: 2\n\n") is None
        assert client.write(b"end", more=False) is None
        assert written.content == expected.content
        assert client.is_complete

    asyncio.run(run())


def test_where_uvicorn_waits_for_the_body_or_writes_no_body_it_is_the_same() -> None:
    async def run(**given: Any) -> None:
        expected, written = Written(), Written()
        of_uvicorn, of_client = cycle(expected, **given), cycle(written, **given)
        await by_uvicorn(of_uvicorn, HEADERS, [b"data: 1", b""])
        client = ClientStream(of_client)
        client.open(HEADERS, b"data: 1")
        client.write(b"", more=False)
        assert written.content == expected.content, given
        assert of_client.waiting_for_100_continue == of_uvicorn.waiting_for_100_continue

    asyncio.run(run(method="HEAD"))
    asyncio.run(run(expect_100_continue=True))


def test_the_log_of_accesses_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        with caplog.at_level(logging.INFO, logger="test"):
            ClientStream(cycle(Written(), access_log=True)).open(HEADERS, b"data: 1")

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [' - "POST / HTTP/1.1" 200']


def test_a_client_that_left_its_end_full_or_left_is_not_written_to() -> None:
    async def run() -> None:
        full, written, gone = Written(), Written(), Written()
        held = cycle(full)
        held.flow.pause_writing()
        pause = ClientStream(held).open(HEADERS, b"data: 1")
        assert pause is not None
        assert full.content == b""
        held.flow.resume_writing()
        await pause()
        ClientStream(cycle(written)).open(HEADERS, b"data: 1")
        assert full.content == written.content != b""
        left = cycle(gone)
        left.disconnected = True
        assert ClientStream(left).open(HEADERS, b"data: 1") is None
        assert gone.content == b""

    asyncio.run(run())


@pytest.mark.parametrize(
    "header", [(b"content-length", b"7"), (b"connection", b"close"), (b"transfer-encoding", b"chunked")]
)
def test_a_header_that_frames_the_answer_is_left_to_uvicorn(header: tuple[bytes, bytes]) -> None:
    async def run() -> None:
        expected, written = Written(), Written()
        await by_uvicorn(cycle(expected), [*HEADERS, header], [b"data: 1", b""])
        client = ClientStream(cycle(written))
        client.open([*HEADERS, header], b"data: 1")
        client.write(b"", more=False)
        assert written.content == expected.content

    asyncio.run(run())


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb", b"a\0b", b"a\x1bb", b"a\x7f"])
def test_a_value_that_would_be_a_line_of_its_own_is_refused_as_uvicorn_does(value: bytes) -> None:
    async def run() -> None:
        written = Written()
        client = ClientStream(cycle(written))
        with pytest.raises(RuntimeError, match="Invalid HTTP header value"):
            client.open([(b"x-request-id", value)], b"data: 1")
        assert written.content == b""

    asyncio.run(run())


def test_a_body_that_has_come_is_taken_once_as_uvicorn_gives_it() -> None:
    async def run() -> None:
        of_uvicorn, of_client = cycle(Written()), cycle(Written())
        for one in (of_uvicorn, of_client):
            one.body += b"abc"
            one.more_body = False
            one.message_event.set()
            one.flow.read_paused = True
        received = await of_uvicorn.receive()
        assert ClientStream(of_client).take_body() == received["body"] == b"abc"  # type: ignore[typeddict-item]
        for one in (of_uvicorn, of_client):
            assert (len(one.body), one.message_event.is_set(), one.flow.read_paused) == (0, False, False)

    asyncio.run(run())


@pytest.mark.parametrize("state", ["more_body", "disconnected", "waiting_for_100_continue"])
def test_a_body_that_is_not_all_here_or_whose_client_left_is_left_to_uvicorn(state: str) -> None:
    async def run() -> None:
        one = cycle(Written())
        one.body += b"abc"
        one.more_body = False
        setattr(one, state, True)
        assert ClientStream(one).take_body() is None
        assert one.body == b"abc"

    asyncio.run(run())
