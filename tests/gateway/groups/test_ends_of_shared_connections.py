"""A shared connection that ends, never opens or says nothing costs its requests no more than is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from processes.gateway_harness import group
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason, GenerateRequest, TextPrompt
from stageline_api.multiplexing import MULTIPLEXED_PATH, Word, client_line
from stageline_gateway.engine_client.generation import EngineClient, EngineTimeouts
from stageline_gateway.engine_client.incoming_lines import IncomingLines, Pause
from stageline_gateway.engine_client.run_events import EngineEvent, EngineLostError, LossKind
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineAddress
from stageline_gateway.groups.backends import Backends, DiscoveredGroups
from stageline_gateway.groups.routing import identity

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = [
    Admitted(prompt_tokens=1),
    Delta(text="a", token_ids=(1,)),
    Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1),
]
REQUEST = GenerateRequest(request_id="r", prompt=TextPrompt(text="x"))
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What an engine does on one connection, behind the request's head."""


def lines(prefix: bytes = b"") -> bytes:
    """A whole answer in a chunk."""
    content = b"".join(prefix + event.to_json() + b"\n" for event in ANSWER)
    return b"%x\r\n%b\r\n" % (len(content), content)


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As an engine does, whatever is asked."""
    writer.write(HEAD)
    while size := int(await reader.readuntil(b"\r\n"), 16):
        for line in (await reader.readexactly(size + 2))[:-2].splitlines():
            if (said := client_line(line)).word is Word.OPEN:
                writer.write(lines(b"%d " % said.stream))


async def answers_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The first request; with the second it breaks the connection."""
    writer.write(HEAD)
    first = True
    while size := int(await reader.readuntil(b"\r\n"), 16):
        said = client_line((await reader.readexactly(size + 2)).splitlines()[0])
        if said.word is Word.OPEN and not first:
            writer.transport.abort()
            return
        if said.word is Word.OPEN:
            writer.write(lines(b"%d " % said.stream))
            first = False


async def is_deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Lets the client in and says nothing more."""
    writer.write(HEAD)
    await reader.read()


async def says_nothing(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def falls_deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Begins the first answer and says nothing more."""
    writer.write(HEAD)
    await reader.readuntil(b"open 0 ")
    content = b"".join(b"0 " + event.to_json() + b"\n" for event in ANSWER[:2])
    writer.write(b"%x\r\n%b\r\n" % (len(content), content))
    await reader.read()


def says(content: bytes) -> Serve:
    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()

    return say


class Engine:
    """Serves its connections as told, one after another, the last way again and again."""

    def __init__(self, *shared: Serve) -> None:
        self._ways = shared
        self.num_shared = 0
        self.server: asyncio.Server | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(f"POST {MULTIPLEXED_PATH} ".encode()), head
            way = self._ways[min(self.num_shared, len(self._ways) - 1)]
            self.num_shared += 1
            await way(reader, writer)
        writer.close()


class Asker:
    def __init__(self, address: EngineAddress, idle_seconds: float) -> None:
        self.address = address
        self.client = EngineClient(EngineTimeouts(60.0, idle_seconds, idle_seconds), EngineKey())

    async def ask(
        self, text: str = "x", on_open: Callable[[IncomingLines], None] = lambda _: None
    ) -> list[EngineEvent]:
        seen: list[EngineEvent] = []
        request = GenerateRequest(request_id="r", prompt=TextPrompt(text=text))
        await self.client.generate(self.address, request, seen.extend, on_open)
        return seen

    async def loss(self, on_open: Callable[[IncomingLines], None] = lambda _: None) -> EngineLostError:
        with pytest.raises(EngineLostError) as lost:
            await self.ask(on_open=on_open)
        return lost.value


@asynccontextmanager
async def asking(engine: Engine, idle_seconds: float = 600.0) -> AsyncIterator[Asker]:
    """Whoever would wait for `idle_seconds` fails by the bound of two minutes."""
    server = engine.server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    asker = Asker(EngineAddress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), idle_seconds)
    try:
        async with asyncio.timeout(120):
            yield asker
    finally:
        asker.client.close()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.01)  # closed sockets are let go of in the loop's next turns


@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        HEAD + b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_one_that_ends_as_it_opens_is_lost_at_once(content: bytes) -> None:
    async def run() -> None:
        async with asking(Engine(says(content))) as asker:
            losses = await asyncio.gather(*(asker.loss() for _ in range(3)))
            assert {loss.kind for loss in losses} == {LossKind.CONNECTION_LOST}

    asyncio.run(run())


def test_an_end_that_crosses_a_request_costs_it_nothing() -> None:
    engine = Engine(says(HEAD + b"0\r\n\r\n"), answers)

    async def run() -> None:
        async with asking(engine) as asker:
            assert await asker.ask() == ANSWER

    asyncio.run(run())
    assert engine.num_shared == 2


def test_who_waits_for_it_to_open_can_be_moved() -> None:
    gone = EngineLostError(LossKind.GONE, "gone")

    async def run() -> None:
        async with asking(Engine(says_nothing)) as asker:

            def move(opened: IncomingLines) -> None:
                asyncio.get_running_loop().call_later(0.05, opened.interrupt, gone)

            stays = asyncio.create_task(asker.ask())
            assert await asker.loss(move) is gone
            assert not stays.done()
            stays.cancel()

    asyncio.run(run())


def test_who_has_waited_for_too_long_for_it_to_open_is_lost_and_the_next_opens_another() -> None:
    engine = Engine(says_nothing, answers)

    async def run() -> None:
        async with asking(engine, idle_seconds=0.2) as asker:
            assert (await asker.loss()).kind is LossKind.STALLED
            assert await asker.ask() == ANSWER

    asyncio.run(run())


def test_one_that_is_deaf_takes_no_more_requests() -> None:
    engine = Engine(is_deaf, answers)

    async def run() -> None:
        async with asking(engine, idle_seconds=0.2) as asker:
            assert (await asker.loss()).kind is LossKind.STALLED
            assert [await asker.ask() for _ in range(3)] == [ANSWER] * 3

    asyncio.run(run())
    assert engine.num_shared == 2


def test_one_that_falls_deaf_within_an_answer_takes_no_more_requests() -> None:
    engine = Engine(falls_deaf, answers)

    async def run() -> None:
        async with asking(engine, idle_seconds=0.2) as asker:
            assert (await asker.loss()).kind is LossKind.STALLED
            assert await asker.ask() == ANSWER

    asyncio.run(run())
    assert engine.num_shared == 2


def test_one_that_is_closed_in_the_turn_that_opened_it_is_lost_at_once() -> None:
    async def run() -> None:
        async with asking(Engine(says_nothing)) as asker:
            waits = asyncio.create_task(asker.loss())
            await asyncio.sleep(0)
            asker.client.close()
            assert (await waits).kind is LossKind.CONNECTION_LOST

    asyncio.run(run())


def test_one_that_ended_while_it_rested_costs_none_of_those_who_come_at_once() -> None:
    engine = Engine(answers_once, answers)

    async def run() -> None:
        async with asking(engine) as asker:
            assert await asker.ask() == ANSWER
            assert await asyncio.gather(*(asker.ask() for _ in range(4))) == [ANSWER] * 4

    asyncio.run(run())
    assert engine.num_shared == 2


def test_its_end_is_one_failure_of_its_engine() -> None:
    async def ends(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await asyncio.sleep(0.2)
        writer.transport.abort()

    async def run() -> list[EngineLostError]:
        async with asking(Engine(ends)) as asker:
            return await asyncio.gather(*(asker.loss() for _ in range(6)))

    losses = asyncio.run(run())
    assert sorted(loss.is_echo for loss in losses) == [False, *[True] * 5]
    backends = Backends(DiscoveredGroups("a test"))
    key = identity(group("http://127.0.0.1:1"))

    async def count() -> None:
        for loss in losses:
            with suppress(EngineLostError), backends.trial(key):
                raise loss
        assert backends.breaker_of(key).is_closed
        for _ in range(5):
            with suppress(EngineLostError), backends.trial(key):
                raise EngineLostError(LossKind.CONNECTION_LOST, "each by itself")
        assert not backends.breaker_of(key).is_closed

    asyncio.run(count())


def test_who_waits_hears_that_the_gateway_closes() -> None:
    async def run() -> None:
        async with asking(Engine(says_nothing)) as asker:
            waits = asyncio.create_task(asker.loss())
            await asyncio.sleep(0.05)
            asker.client.close()
            assert (await waits).kind is LossKind.CONNECTION_LOST

    asyncio.run(run())


def test_an_engine_that_does_not_read_is_not_written_to_without_end() -> None:
    engine = Engine(reads_nothing)

    async def run() -> None:
        async with asking(engine) as asker:
            asked: list[asyncio.Task[object]] = []
            while engine.num_shared < 2:
                assert len(asked) < 2000, "100 MB were written to an engine that reads none"
                asked.append(asyncio.create_task(asker.ask("x" * 50_000)))
                await asyncio.wait(asked[-1:], timeout=0.001)
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(run())


async def reads_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """But what asyncio reads ahead."""
    writer.write(HEAD)
    await asyncio.sleep(600)  # the loop would forget whoever waits for nothing


@pytest.mark.parametrize("status", [b"404 Not Found", b"502 Bad Gateway"])
def test_one_that_is_refused_is_a_loss_that_names_the_status(status: bytes) -> None:
    async def run() -> None:
        async with asking(Engine(says(b"HTTP/1.1 %b\r\ncontent-length: 4\r\n\r\nsorr" % status), answers)) as asker:
            loss = await asker.loss()
            assert (loss.kind, loss.message) == (
                LossKind.PROTOCOL,
                f"The engine answered with status {status[:3].decode()}.",
            )
            assert await asker.ask() == ANSWER

    asyncio.run(run())


def test_an_engine_that_ends_over_a_request_on_a_used_connection_counts_as_lost() -> None:
    """Not as one that never got it: the request may be what ended it."""

    async def answers_once_and_is_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answers_once(reader, writer)
        assert engine.server is not None
        engine.server.close()

    engine = Engine(answers_once_and_is_gone)

    async def run() -> None:
        async with asking(engine) as asker:
            assert await asker.ask() == ANSWER
            assert (await asker.loss()).kind is LossKind.CONNECTION_LOST

    asyncio.run(run())
    assert engine.num_shared == 1


def test_events_of_one_read_come_at_once_and_wait_for_a_slow_reader() -> None:
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

    async def run() -> None:
        async with asking(Engine(answers)) as asker:
            await asker.client.generate(asker.address, REQUEST, take)

    asyncio.run(run())
    assert (sum(taken), rested) == (len(ANSWER), len(taken)), taken
    assert len(taken) == 1, f"one read was given in parts: {taken}"
