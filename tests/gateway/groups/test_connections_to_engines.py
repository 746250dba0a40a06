"""Connections to engines are used again after a whole answer, and only then; one that had ended costs no request."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from stageline_api.engine_http import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    TextPrompt,
)
from stageline_gateway.engine_client.generation import EngineClient, EngineTimeouts
from stageline_gateway.engine_client.incoming_lines import Pause
from stageline_gateway.engine_client.run_events import EngineEvent, EngineLostError, LossKind
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineAddress

REQUEST = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"))
SAID: list[Event] = [
    Admitted(prompt_tokens=1),
    *[Delta(text=text, token_ids=(1,)) for text in "abc"],
    Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=3),
]
WELL = [SAID[0], Delta(text="abc", token_ids=(1, 1, 1)), SAID[-1]]
"""What is heard of it where it came at once."""
END = b"0\r\n\r\n"


def written(events: Sequence[Event]) -> bytes:
    """The beginning of an answer with these events, in one chunk."""
    body = b"".join(event.model_dump_json().encode() + b"\n" for event in events)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(body), body)


class Engine:
    """Answers each request on a connection as `answers` says by their number there; then it closes the connection."""

    def __init__(self, *answers: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.answers = answers
        self.requests_on: list[int] = []
        """Requests on each connection, in the order in which these came."""
        self.ended = asyncio.Event()
        """A connection has ended, on this side."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.requests_on)
        self.requests_on.append(0)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            for answer in self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
                self.requests_on[number] += 1
                await answer(writer)
                await writer.drain()
        writer.close()
        self.ended.set()


def say(content: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Answer with these bytes."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(content)

    return answer


def ask(engine: Engine, use: Callable[[Callable[[], Awaitable[list[EngineEvent]]]], Awaitable[None]]) -> None:
    """Let `use` send requests to `engine`, one after another."""

    async def both() -> None:
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        client = EngineClient(EngineTimeouts(connect_seconds=60), EngineKey())
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        async def one() -> list[EngineEvent]:
            seen: list[EngineEvent] = []
            await client.generate(EngineAddress(url), REQUEST, lambda events: seen.extend(events))
            return seen

        try:
            async with asyncio.timeout(120):
                await use(one)
        finally:
            client.close()
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0.01)  # closed sockets are let go of in the loop's next turns

    asyncio.run(both())


def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    engine = Engine(*[say(written(SAID) + END)] * 3)

    async def use(one: Callable[[], Awaitable[list[EngineEvent]]]) -> None:
        for _ in range(3):
            assert await one() == WELL

    ask(engine, use)
    assert engine.requests_on == [3]


def test_an_end_that_comes_late_keeps_nobody_waiting_and_the_connection() -> None:
    may_end = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        writer.write(written(SAID))
        await may_end.wait()
        writer.write(END)

    engine = Engine(late, say(written(SAID) + END))

    async def use(one: Callable[[], Awaitable[list[EngineEvent]]]) -> None:
        assert await one() == WELL
        may_end.set()
        while engine.requests_on != [2]:
            await asyncio.sleep(0.01)
            assert await one() == WELL

    ask(engine, use)


@pytest.mark.parametrize(
    "answered",
    [
        written(SAID) + END + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        written(SAID).replace(b"\r\n", b"\r\nconnection: close\r\n", 1) + END,
        written([*SAID[:-1], Failed(message="no", is_final=True)]) + b"1\r\n\n\r\n",
    ],
    ids=["says more than it was asked", "will close it", "has not ended"],
)
def test_any_other_connection_is_closed(answered: bytes) -> None:
    engine = Engine(*[say(answered)] * 2)

    async def use(one: Callable[[], Awaitable[list[EngineEvent]]]) -> None:
        for _ in range(2):
            with suppress(Exception):
                await one()
            await asyncio.wait_for(engine.ended.wait(), 60)
            engine.ended.clear()

    ask(engine, use)
    assert engine.requests_on == [1, 1]


def test_a_connection_that_had_ended_costs_no_request() -> None:
    """Its engine closes it in the moment in which it is used: the request goes out again on a new one."""

    async def close(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    engine = Engine(say(written(SAID) + END), close)

    async def use(one: Callable[[], Awaitable[list[EngineEvent]]]) -> None:
        for _ in range(4):
            assert await one() == WELL

    ask(engine, use)
    assert engine.requests_on == [2, 2, 2, 1]


def test_an_engine_that_ends_over_a_request_on_a_used_connection_counts_as_lost() -> None:
    """Not as one that never got it: the request may be what ended it."""
    engine = Engine(say(written(SAID) + END))
    servers: list[asyncio.Server] = []

    async def end(writer: asyncio.StreamWriter) -> None:
        servers[0].close()
        writer.transport.abort()

    engine.answers += (end,)

    async def both() -> None:
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        servers.append(server)
        client = EngineClient(EngineTimeouts(connect_seconds=60), EngineKey())
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await client.generate(EngineAddress(url), REQUEST, lambda _: None)
        with pytest.raises(EngineLostError) as lost:
            await client.generate(EngineAddress(url), REQUEST, lambda _: None)
        assert lost.value.kind is LossKind.CONNECTION_LOST
        client.close()
        await asyncio.sleep(0.01)

    asyncio.run(both())
    assert engine.requests_on == [2]


def test_events_of_one_read_come_at_once_and_wait_for_a_slow_reader() -> None:
    engine = Engine(say(written(SAID) + END))
    taken: list[int] = []
    rested = 0

    async def rest() -> None:
        nonlocal rested
        await asyncio.sleep(0.01)
        rested += 1

    def take(events: Sequence[EngineEvent]) -> Pause | None:
        assert rested == len(taken), "more was given before the pause was over"
        taken.append(len(events))
        return rest

    async def both() -> None:
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        client = EngineClient(EngineTimeouts(connect_seconds=60), EngineKey())
        await client.generate(EngineAddress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), REQUEST, take)
        client.close()
        server.close()
        await asyncio.sleep(0.01)

    asyncio.run(both())
    assert (sum(taken), rested) == (len(WELL), len(taken)), taken
    assert len(taken) <= 2, f"one read was given in parts: {taken}"
