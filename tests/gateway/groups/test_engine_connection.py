"""The gateway's connection to an engine: what it gives out, how long it waits, and what it never keeps in memory."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_gateway.engine_client import incoming_lines
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.incoming_lines import ConnectionBrokenError, SilentEngineError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(content: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def converse(answer: Answer, use: Callable[[EngineConnection], Awaitable[None]]) -> None:
    """Serve `answer` to one request and `use` the connection that asks."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            with suppress(ConnectionError):
                await answer(writer)
                await writer.drain()
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            writer.close()

    async def both() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, connection = await asyncio.get_running_loop().create_connection(EngineConnection, "127.0.0.1", port)
        connection.get("engine", "/")
        try:
            async with asyncio.timeout(120):
                await use(connection)
        finally:
            connection.close()
            server.close()
            handlers = asyncio.all_tasks() - {asyncio.current_task()}
            for handler in handlers:
                handler.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)
            await asyncio.sleep(0.01)  # closed sockets are let go of in the loop's next turns

    asyncio.run(both())


async def all_lines(connection: EngineConnection) -> list[bytes]:
    """Every line up to the end."""
    lines: list[bytes] = []
    while (line := await connection.line(60)) is not None:
        lines.append(line)
    return lines


LINES = st.lists(st.binary(min_size=1, max_size=8).filter(lambda line: b"\n" not in line and line.strip()), max_size=6)


@given(LINES, st.integers(1, 7), st.booleans())
def test_lines_are_whole_however_they_are_cut(lines: list[bytes], piece: int, ends_in_newline: bool) -> None:
    body = b"\n".join(lines) + (b"\n" if ends_in_newline else b"")

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for start in range(0, len(body), piece):
            writer.write(chunk(body[start : start + piece]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def use(connection: EngineConnection) -> None:
        assert await connection.head(60) == 200
        assert await all_lines(connection) == lines

    converse(answer, use)


SIZES = [b"%x", b"0%x", b"%X", b"%x;a=b", b" %x", b"+%x", b"0x%x", b"%x_0", b"%d"]
CONTENTS = st.binary(min_size=1, max_size=40) | st.lists(
    st.sampled_from([b"one", b"two 2", b"", b" ", b"\r", b"3\r"]), min_size=1, max_size=4
).map(lambda lines: b"".join(line + b"\n" for line in lines))


def read_at_once(reads: Sequence[bytes]) -> tuple[object, ...]:
    """What a connection that nobody reads from has made of these reads."""

    async def read() -> tuple[object, ...]:
        connection = EngineConnection()
        for one in reads:
            connection.data_received(one)
        failure = str(connection._failure)
        return connection._lines, connection._rest_bytes, connection._is_complete, failure

    return asyncio.run(read())


@given(
    contents=st.lists(CONTENTS, max_size=5),
    sizes=st.lists(st.sampled_from([b"%x", b"%x", *SIZES]), min_size=5, max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    is_ended=st.booleans(),
)
def test_lines_do_not_depend_on_where_reads_end(
    contents: list[bytes], sizes: list[bytes], cuts: list[int], is_ended: bool
) -> None:
    """At the chunks' ends and at any other place, and where a size is no size."""
    chunks = [HEAD, *(b"%b\r\n%b\r\n" % (size % len(one), one) for size, one in zip(sizes, contents, strict=False))]
    whole = b"".join(chunks) + b"0\r\n\r\n" * is_ended
    ends = {0, len(whole), *(sum(map(len, chunks[:count])) for count in range(1, len(chunks) + 1))}

    def pieces(places: set[int]) -> list[bytes]:
        ordered = sorted({min(place, len(whole)) for place in places | {0, len(whole)}})
        return [whole[start:end] for start, end in pairwise(ordered)]

    expected = read_at_once([whole])
    assert read_at_once(pieces(ends)) == expected
    assert read_at_once(pieces(ends | set(cuts))) == expected


def test_a_wait_whose_limit_is_longer_than_its_timer_looks_now_and_then_and_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of the test's own: one that looked for the rest of its time without a pause would take a core."""
    monkeypatch.setattr(incoming_lines, "LONGEST_TIMER_SECONDS", 30.0)

    async def run() -> None:
        loop, now, looks = asyncio.get_running_loop(), [1000.0], list[float]()
        timers: list[tuple[float, Callable[[], None]]] = []

        def call_at(when: float, look: Callable[[], None]) -> SimpleNamespace:
            timers.append((when, look))
            return SimpleNamespace(when=lambda: when, cancel=lambda: timers.remove((when, look)))

        monkeypatch.setattr(loop, "time", lambda: now[0])
        connection = EngineConnection()
        monkeypatch.setattr(loop, "call_at", call_at)
        waiting = asyncio.create_task(connection.line(100.0))
        await asyncio.sleep(0)
        while not waiting.done():
            when, look = timers.pop()
            assert not timers
            assert len(looks) < 10, looks
            now[0] = max(now[0], when)
            looks.append(now[0])
            look()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert looks == [1030.0, 1060.0, 1090.0, 1100.0]
        with pytest.raises(SilentEngineError):
            await waiting

    asyncio.run(run())


def test_less_silence_that_is_allowed_within_a_wait_needs_no_timer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        connection, armed = EngineConnection(), list[float]()
        call_at = connection._loop.call_at

        def noted(when: float, look: Callable[[], None]) -> asyncio.TimerHandle:
            armed.append(when)
            return call_at(when, look)

        connection.data_received(HEAD)
        reading = asyncio.create_task(connection.relay(lambda _: None, 120.0))
        monkeypatch.setattr(connection._loop, "call_at", noted)
        await asyncio.sleep(0)
        connection.allow_silence(30.0)
        connection.allow_silence(29.0)
        await asyncio.sleep(0)
        began = connection._silent_since
        assert [round(when - began) for when in armed] == [30, 29]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        connection.close()

    asyncio.run(run())


def test_silence_is_measured_from_the_last_line_and_by_the_limit_of_the_wait() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one\n"))
        await asyncio.sleep(600)

    async def use(connection: EngineConnection) -> None:
        assert await connection.line(60) == b"one"
        began = asyncio.get_running_loop().time()
        with pytest.raises(SilentEngineError):
            await connection.line(0.2)  # the timer of the first wait was set for much later
        assert asyncio.get_running_loop().time() - began >= 0.2

    converse(answer, use)


def test_what_came_while_the_gateway_stood_still_is_not_silence() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(HEAD + chunk(b"one\n"))
        await asyncio.sleep(600)

    def stand_still() -> None:
        """The line is here and the wait's time over when the loop looks at both again."""
        writers[0].write(chunk(b"two\n"))
        time.sleep(0.4)

    async def use(connection: EngineConnection) -> None:
        assert await connection.line(60) == b"one"
        asyncio.get_running_loop().call_soon(stand_still)
        assert await connection.line(0.2) == b"two"
        writers[0].write(chunk(b"three\n"))
        assert await connection.line(60) == b"three"

    converse(answer, use)


def test_a_blank_line_is_no_event_and_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it an engine says that a request is queued still: however long that takes, it isn't lost. By a clock of the
    test's own, which no busy machine moves."""

    async def run() -> None:
        loop, now = asyncio.get_running_loop(), [1000.0]
        monkeypatch.setattr(loop, "time", lambda: now[0])
        connection = EngineConnection()
        connection.data_received(HEAD)
        waiting = asyncio.create_task(connection.line(30.0))

        async def turn(seconds: float, content: bytes) -> None:
            await asyncio.sleep(0)
            now[0] += seconds
            if content:
                connection.data_received(chunk(content))
            for _ in range(4):
                await asyncio.sleep(0)

        for _ in range(10):
            await turn(29.0, b"\n")
            assert not waiting.done(), waiting
        await turn(29.0, b"one\n")
        assert waiting.result() == b"one"
        waiting = asyncio.create_task(connection.line(30.0))
        await turn(29.0, b"\n")
        await turn(30.0, b"")
        assert isinstance(waiting.exception(), SilentEngineError)

    asyncio.run(run())


def test_an_interrupt_ends_the_wait_after_what_has_come() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one\ntwo\n"))
        await asyncio.sleep(600)

    async def use(connection: EngineConnection) -> None:
        assert await connection.line(60) == b"one"
        connection.interrupt(LookupError("gone"))
        assert await connection.line(60) == b"two"
        with pytest.raises(LookupError):
            await connection.line(60)

    converse(answer, use)


def test_a_reader_that_stops_reading_stops_the_engine() -> None:
    written = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(HEAD)
        for _ in range(10_000):
            writer.write(chunk(b"x" * 10_000 + b"\n"))
            await writer.drain()
            written += 1
        writer.write(b"0\r\n\r\n")

    async def use(connection: EngineConnection) -> None:
        assert await connection.line(60)
        before, looks_alike = written, 0
        while looks_alike < 50:  # until the engine is stopped: it goes on in every turn of the loop that it can
            await asyncio.sleep(0.01)
            looks_alike = looks_alike + 1 if before == written else 0
            before = written
        assert EngineConnection.most_waiting <= written < 5_000, written
        assert len(await all_lines(connection)) == 9_999

    converse(answer, use)


@pytest.mark.parametrize(
    "answered", [b"not HTTP\r\n\r\n", HEAD + b"zz\r\n", b""], ids=["no HTTP", "no chunk", "nothing"]
)
def test_what_is_no_answer_breaks_the_connection(answered: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(answered)

    async def use(connection: EngineConnection) -> None:
        with pytest.raises(ConnectionBrokenError):
            await all_lines(connection)

    converse(answer, use)
