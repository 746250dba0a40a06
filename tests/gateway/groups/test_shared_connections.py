"""Requests to one engine share a connection: each has its own answer, and nobody pays for another's but by its end."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from processes.gateway_harness import eventually
from processes.scripted_engine import Drop, Hold, KeepSaying, Raw, Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import (
    Admitted,
    Delta,
    EngineError,
    ErrorCode,
    Finished,
    GenerateRequest,
    SamplingParams,
    TextPrompt,
)
from stageline_api.multiplexing import MOST_LINE_BYTES, QUICK_LINE_BYTES, Word
from stageline_gateway.engine_client import engine_connections
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.generation import EngineClient, EngineTimeouts
from stageline_gateway.engine_client.incoming_lines import Pause
from stageline_gateway.engine_client.run_events import EngineEvent, EngineLostError, EngineRefusedError, LossKind
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineAddress

ADMITTED = Say(Admitted(prompt_tokens=1))


def asked(name: str, text: str = "x", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=TextPrompt(text=text), sampling=SamplingParams(**sampling))


class Asker:
    """A gateway's client of one engine, all of whose requests may share a connection."""

    def __init__(self, engine: ScriptedEngine, key: EngineKey) -> None:
        self.engine = engine
        self.client = EngineClient(EngineTimeouts(60.0, 60.0, 60.0), key)

    async def ask(self, request: GenerateRequest) -> list[EngineEvent]:
        seen: list[EngineEvent] = []
        await self.take(request, seen.extend)
        return seen

    async def text(self, name: str) -> str:
        return text_of(await self.ask(asked(name)))

    async def take(self, request: GenerateRequest, take: Callable[[Sequence[EngineEvent]], Pause | None]) -> None:
        await self.client.generate(EngineAddress(self.engine.url), request, take)


def text_of(events: Sequence[EngineEvent]) -> str:
    assert isinstance(events[0], Admitted), events
    assert isinstance(events[-1], Finished), events
    return "".join(event.text for event in events if isinstance(event, Delta))


def use(engine: ScriptedEngine, work: Callable[[Asker], Awaitable[None]], key: EngineKey | None = None) -> None:
    async def run() -> None:
        asker = Asker(engine, key or EngineKey())
        try:
            async with asyncio.timeout(120):
                await work(asker)
        finally:
            asker.client.close()
            await asyncio.sleep(0.01)  # closed sockets are let go of in the loop's next turns

    asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine is in a thread of its own
            await asyncio.sleep(0.005)


@contextmanager
def idle_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(engine_connections, "IDLE_SECONDS", seconds)
        yield


def test_requests_share_one_connection_and_each_has_its_own_answer(engine: ScriptedEngine) -> None:
    engine.script = lambda request: answer(*(f"{request.request_id}.{index} " for index in range(20)))

    async def all_at_once(asker: Asker) -> None:
        texts = await asyncio.gather(*(asker.text(str(index)) for index in range(50)))
        assert texts == ["".join(f"{index}.{word} " for word in range(20)) for index in range(50)]
        assert await asker.text("later") == "".join(f"later.{word} " for word in range(20))

    use(engine, all_at_once)
    assert engine.num_shared == 1
    numbers = [line.stream for line in engine.said_on_shared if line.word is Word.OPEN]
    assert numbers == list(range(51))
    assert not any(line.word is Word.CLOSE for line in engine.said_on_shared), "what has ended needs no closing"


def test_who_leaves_stops_its_own_generation_alone(engine: ScriptedEngine) -> None:
    engine.script = lambda _: [ADMITTED, Hold(), *answer("a", "b")[1:]]

    async def leave(asker: Asker) -> None:
        leaves, stays = (asyncio.create_task(asker.ask(asked(name))) for name in ("leaves", "stays"))
        await until(lambda: len(engine.requests) == 2)
        leaves.cancel()
        await until(lambda: any(line.word is Word.CLOSE for line in engine.said_on_shared))
        engine.release()
        assert text_of(await stays) == "ab"

    use(engine, leave)
    eventually(lambda: engine.left_early == ["leaves"], lambda: f"{engine.left_early}")
    assert engine.num_shared == 1


def test_a_slow_reader_holds_its_own_stream_alone(engine: ScriptedEngine) -> None:
    words = [f"{index} " for index in range(2000)]
    engine.script = lambda _: answer(*words)
    may_read = asyncio.Event()
    seen: list[EngineEvent] = []

    def take(events: Sequence[EngineEvent]) -> Pause | None:
        seen.extend(events)
        return None if may_read.is_set() else wait

    async def wait() -> None:
        await may_read.wait()

    async def read(asker: Asker) -> None:
        slow = asyncio.create_task(asker.take(asked("slow"), take))
        await until(lambda: any(line.word is Word.HOLD for line in engine.said_on_shared))
        assert await asker.text("quick") == "".join(words)
        may_read.set()
        await slow

    use(engine, read)
    assert text_of(seen) == "".join(words)
    told = [line for line in engine.said_on_shared if line.word in (Word.HOLD, Word.GO_ON)]
    assert [line.word for line in told[:2]] == [Word.HOLD, Word.GO_ON]
    assert len({line.stream for line in told}) == 1


def test_the_connections_end_ends_all_and_the_next_request_opens_another(engine: ScriptedEngine) -> None:
    engine.script = lambda request: [ADMITTED, Hold(), Drop()] if request.request_id != "last" else answer("whole")

    async def lose(asker: Asker) -> None:
        waiting = [asyncio.create_task(asker.ask(asked(str(index)))) for index in range(5)]
        await until(lambda: len(engine.requests) == 5)
        engine.release()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineLostError] * 5, ends
        assert {end.kind for end in ends if isinstance(end, EngineLostError)} == {LossKind.CONNECTION_LOST}
        assert await asker.text("last") == "whole"

    use(engine, lose)
    assert engine.num_shared == 2


def test_a_resting_connection_that_has_ended_costs_no_request(engine: ScriptedEngine) -> None:
    """Nobody noticed: it ends with the first request on it, which goes out again on a new one."""
    broken: list[str] = []

    def script(request: GenerateRequest) -> list[Step]:
        if request.request_id == "second" and not broken:
            broken.append(request.request_id)
            return [Drop()]
        return answer(request.request_id)

    engine.script = script

    async def ask(asker: Asker) -> None:
        assert await asker.text("first") == "first"
        assert await asker.text("second") == "second"

    use(engine, ask)
    assert (engine.num_shared, broken) == (2, ["second"])


def test_one_that_ends_between_two_looks_costs_no_request(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may say that it has ended right behind having said that it has not."""
    looks: list[bool] = []

    def is_open(connection: EngineConnection) -> bool:
        if len(looks) == 1 and connection._transport is not None:
            connection._transport.abort()
        looks.append(connection._transport is not None and not connection._transport.is_closing())
        return looks[-1]

    engine.script = lambda request: answer(request.request_id)

    async def ask(asker: Asker) -> None:
        assert await asker.text("first") == "first"
        monkeypatch.setattr(EngineConnection, "is_open", property(is_open))
        assert await asker.text("second") == "second"

    use(engine, ask)
    assert looks[:2] == [True, False], looks
    assert engine.num_shared == 2


def test_it_is_closed_when_it_has_rested(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(asker: Asker) -> None:
        await asker.text("a")
        assert len(asker.client._connections._shared) == 1
        await until(lambda: not asker.client._connections._shared)
        await asker.text("b")

    with idle_seconds(monkeypatch, 0.05):
        use(engine, ask)
    assert engine.num_shared == 2


def test_a_refusal_is_its_streams_alone(engine: ScriptedEngine) -> None:
    error = EngineError(code=ErrorCode.QUEUE_FULL, message="full")
    engine.script = lambda request: [Refuse(503, error)] if request.request_id == "refused" else answer("ok")

    async def ask(asker: Asker) -> None:
        with pytest.raises(EngineRefusedError) as refused:
            await asker.ask(asked("refused"))
        assert refused.value.error == error
        assert await asker.text("other") == "ok"

    use(engine, ask)
    assert engine.num_shared == 1


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"type":"delta","text":1}\n', b'{"type":"refused"}\n'])
def test_a_line_that_can_not_be_read_is_its_streams_matter(engine: ScriptedEngine, line: bytes) -> None:
    engine.script = lambda request: [ADMITTED, Raw(line), Hold()] if request.request_id == "bad" else answer("ok")

    async def ask(asker: Asker) -> None:
        with pytest.raises(EngineLostError) as lost:
            await asker.ask(asked("bad"))
        assert lost.value.kind is LossKind.PROTOCOL
        assert await asker.text("other") == "ok"

    use(engine, ask)
    assert engine.num_shared == 1


def test_a_line_of_no_stream_ends_the_connection(engine: ScriptedEngine) -> None:
    engine.script = lambda request: (
        [ADMITTED, Raw(b'{"type":"delta","text":"","token_ids":[]}\nnobody says this\n')]
        if request.request_id == "bad"
        else answer("ok")
    )

    async def ask(asker: Asker) -> None:
        with pytest.raises(EngineLostError) as lost:
            await asker.ask(asked("bad"))
        assert lost.value.kind is LossKind.CONNECTION_LOST
        assert await asker.text("other") == "ok"

    use(engine, ask)
    assert engine.num_shared == 2


def test_what_is_long_shares_a_connection_of_its_own(engine: ScriptedEngine) -> None:
    long = [
        asked("body", "x" * QUICK_LINE_BYTES),
        asked("logprobs", top_logprobs=5),
        asked("echo", prompt_told=0),
    ]

    async def ask(asker: Asker) -> None:
        assert await asker.text("short") == "Hello world"
        for request in long:
            assert text_of(await asker.ask(request)) == "Hello world"
        assert await asker.text("short again") == "Hello world"

    use(engine, ask)
    assert engine.num_shared == 2
    opened = [line.stream for line in engine.said_on_shared if line.word is Word.OPEN]
    assert opened == [0, 0, 1, 2, 1]


def test_what_no_engine_would_read_is_refused_before_it_is_sent(engine: ScriptedEngine) -> None:
    async def ask(asker: Asker) -> None:
        assert text_of(await asker.ask(asked("fits", "x" * (MOST_LINE_BYTES - 1000)))) == "Hello world"
        with pytest.raises(EngineRefusedError) as refused:
            await asker.ask(asked("too long", "x" * MOST_LINE_BYTES))
        assert refused.value.error.code is ErrorCode.INVALID_VALUE
        assert f"at most {MOST_LINE_BYTES}" in refused.value.error.message

    use(engine, ask)
    assert [request.request_id for request in engine.requests] == ["fits"]


def test_fields_that_this_version_does_not_know_are_ignored(engine: ScriptedEngine) -> None:
    def newer(step: Step) -> Step:
        assert isinstance(step, Say)
        event = msgspec.to_builtins(step.event) | {"of_a_newer_version": {"is": [1]}}
        return Raw(json.dumps(event).encode() + b"\n")

    engine.script = lambda _: [newer(step) for step in answer("Hello", " world")]

    async def ask(asker: Asker) -> None:
        assert await asker.text("a") == "Hello world"

    use(engine, ask)


def test_who_opens_it_and_leaves_takes_it_from_nobody(engine: ScriptedEngine) -> None:
    async def ask(asker: Asker) -> None:
        opens = asyncio.create_task(asker.ask(asked("opens")))
        await asyncio.sleep(0)
        waits = asyncio.create_task(asker.text("waits"))
        await asyncio.sleep(0)
        opens.cancel()
        assert await waits == "Hello world"

    use(engine, ask)
    assert engine.num_shared == 1


def test_an_engine_that_is_not_there_is_so_for_all_who_wait(engine: ScriptedEngine) -> None:
    engine.stop()

    async def ask(asker: Asker) -> None:
        ends = await asyncio.gather(*(asker.text(str(index)) for index in range(3)), return_exceptions=True)
        assert [end.kind for end in ends if isinstance(end, EngineLostError)] == [LossKind.UNREACHABLE] * 3, ends

    use(engine, ask)


def test_a_key_that_is_not_taken_is_said_so_and_a_new_one_opens_another(engine: ScriptedEngine) -> None:
    first, second, other = "k" * 16, "l" * 16, "m" * 16
    engine.keys = (first, second)
    key = EngineKey()

    async def ask(asker: Asker) -> None:
        key.take(other)
        with pytest.raises(EngineLostError) as lost:
            await asker.text("a")
        assert lost.value.kind is LossKind.PROTOCOL
        key.take(first)
        assert await asker.text("b") == "Hello world"
        key.take(second)
        assert await asker.text("c") == "Hello world"

    use(engine, ask, key)
    assert engine.num_shared == 2


def test_a_silent_engine_is_left_though_others_streams_go_on(engine: ScriptedEngine) -> None:
    def script(request: GenerateRequest) -> list[Step]:
        goes_on = request.request_id == "goes on"
        waits: Step = KeepSaying(Delta(text="", token_ids=()), 0.02) if goes_on else Hold()
        return [ADMITTED, waits, *answer("a")[1:]]

    engine.script = script

    async def ask(asker: Asker) -> None:
        goes_on = asyncio.create_task(asker.text("goes on"))
        await until(lambda: engine.requests)
        asker.client._timeouts = EngineTimeouts(60.0, 0.5, 0.5)
        with pytest.raises(EngineLostError) as lost:
            await asker.text("silent")
        assert lost.value.kind is LossKind.STALLED
        await until(lambda: any(line.word is Word.CLOSE for line in engine.said_on_shared))
        asker.client._timeouts = EngineTimeouts(60.0, 60.0, 60.0)
        engine.release()
        engine.hush()
        assert [await goes_on, await asker.text("other")] == ["a", "a"]

    use(engine, ask)
    assert engine.num_shared == 1
    eventually(lambda: engine.left_early == ["silent"], lambda: f"{engine.left_early}")
