"""Many streams over one real connection: the events of `/v1/generate`, and all that a step says in one write."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from processes.multiplexed_client import MultiplexedClient, about, multiplexed, open_line
from processes.scripted_core_server import (
    MAX_MODEL_LEN,
    ScriptedCore,
    ids_of,
    says,
    says_forever,
    says_nothing,
    serve,
    until,
)
from stageline_api.engine_http import ErrorCode, FinishReason, GenerateRequest
from stageline_api.multiplexing import LINE_LIMIT_BYTES, QUICK_LINE_BYTES, ClientLine, Word
from stageline_runtime.engine.core_api import (
    AdmittedRequest,
    AnswerSink,
    CoreEvent,
    EndEvent,
    EngineRefusal,
    FailEvent,
    TokenEvent,
)
from stageline_runtime.engine.edge import answer_lines, connection_streams, generation
from stageline_runtime.engine.edge import multiplexed as multiplexed_answers
from stageline_runtime.engine.edge.connection_streams import ConnectionStreams
from stageline_runtime.engine.edge.generation import Generation
from stageline_runtime.engine.text.schema_check import SchemaCheck

KEY = "some-key-0123456789"
Use = Callable[[httpx.AsyncClient, MultiplexedClient], Awaitable[None]]


def asked(request_id: str, text: str = "hello", **sampling: Any) -> dict[str, Any]:
    return {"request_id": request_id, "prompt": {"kind": "text", "text": text}, "sampling": sampling}


@dataclass
class SteppedCore(ScriptedCore):
    """Its requests have a token each when the test says so, all in one turn of the event loop."""

    sinks: dict[str, AnswerSink] = field(default_factory=dict)
    refusal: EngineRefusal | None = None

    def submit(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)
        self.sinks[request.request_id] = sink

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted.append(request_id)
        if (sink := self.sinks.pop(request_id, None)) is not None:
            sink(EndEvent(reason))

    def step(self, text: str) -> None:
        for sink in self.sinks.values():
            sink(TokenEvent(ids_of(text)))

    def end(self) -> None:
        for request_id in list(self.sinks):
            self.sinks.pop(request_id)(EndEvent(FinishReason.LENGTH))


def stepped(refusal: EngineRefusal | None = None) -> SteppedCore:
    return SteppedCore(says_nothing, refusal=refusal)


def connected(core: ScriptedCore, directory: Path, use: Use) -> None:
    """Run `use` with a client of a server over `core`, and a connection to it."""

    async def run() -> None:
        async with serve(core, directory) as client, multiplexed(client) as connection:
            await asyncio.wait_for(use(client, connection), 60)

    asyncio.run(run())


def joined(events: list[Any]) -> tuple[Any, str, list[int], Any]:
    """The first event, all text, all ids, the last event."""
    first, *deltas, last = events
    assert all(delta["type"] == "delta" for delta in deltas), events
    return first, "".join(delta["text"] for delta in deltas), [i for delta in deltas for i in delta["token_ids"]], last


async def generated(client: httpx.AsyncClient, request: dict[str, Any]) -> list[Any]:
    answer = await client.post("/v1/generate", json=request)
    return [json.loads(line) for line in answer.text.splitlines() if line]


def test_streams_together_get_what_each_gets_alone(tmp_path: Path) -> None:
    chat = {"kind": "chat", "messages": [{"role": "user", "content": "é"}]}
    requests = [
        asked("r1", max_tokens=40),
        asked("r2", stop=["User:"]),
        {"request_id": "r3", "prompt": chat},
        asked("r4", "much longer, and read in a thread " * 1000),
        asked("r5") | {"generated_token_ids": ids_of("one"), "generated_characters": 2},
        asked("r6", json_schema='{"type": "object"}'),
    ]

    async def use(client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(*(open_line(number, request) for number, request in enumerate(requests)))
        told = await connection.until_over(*range(len(requests)))
        for number, request in enumerate(requests):
            alone = await generated(client, request)
            assert joined(told[number]) == joined(alone)

    connected(ScriptedCore(says("one 😀\nUser: two")), tmp_path, use)


def test_both_bodies_are_open_at_once(tmp_path: Path) -> None:
    core = stepped()

    async def run() -> None:
        async with serve(core, tmp_path) as client, multiplexed(client) as connection:
            for number in range(3):
                await connection.say(open_line(number, asked(f"r{number}")))
                await connection.until_admitted(number)
                core.step("a")
                assert {event["text"] for _, event in await connection.next_write()} == {"a"}
            await connection.say(about("close", 0), b"no line")
            assert await connection.rest() == []
            assert connection.is_whole
            async with multiplexed(client) as lost:
                await lost.say(open_line(0, asked("lost")))
                await lost.until_admitted(0)
            await until(lambda: core.aborted == ["r0", "r1", "r2", "lost"], f"aborts: {core.aborted}")

    asyncio.run(run())


def test_all_tokens_of_a_step_come_in_one_write(tmp_path: Path) -> None:
    core = stepped()

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(*(open_line(number, asked(f"r{number}")) for number in range(50)))
        await connection.until_admitted(*range(50))
        for text in ("a", "b"):
            core.step(text)
            write = await connection.next_write()
            assert [(number, event["text"]) for number, event in write] == [(n, text) for n in range(50)]
        core.end()
        assert [(n, event["type"]) for n, event in await connection.next_write()] == [
            (n, "finished") for n in range(50)
        ]

    connected(core, tmp_path, use)


def test_a_held_stream_says_nothing_until_it_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    core = stepped()

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, asked("held")))
        await connection.until_admitted(0)
        await connection.say(about("hold", 0), open_line(1, asked("free")))
        await connection.until_admitted(1)
        for text in "abc":
            core.step(text)
            assert [(number, event["text"]) for number, event in await connection.next_write()] == [(1, text)]
        await connection.say(about("go_on", 0), about("go_on", 0))
        [(number, delta)] = await connection.next_write()
        assert (number, delta["text"], tuple(delta["token_ids"])) == (0, "abc", ids_of("abc"))
        await connection.say(about("hold", 0), about("hold", 7), open_line(2, asked("last")))
        await connection.until_admitted(2)
        core.step("d")
        core.end()
        told = await connection.until_over(1, 2)
        assert joined([None, *told[1]])[1] == "d"
        await connection.say(about("go_on", 0))
        assert [(n, event["type"]) for n, event in await connection.next_write()] == [(0, "delta"), (0, "finished")]

    connected(core, tmp_path, use)
    assert core.aborted == []


@pytest.mark.parametrize(
    ("num_streams", "text", "num_tokens"),
    [
        pytest.param(1, "x", 150_000, id="one-long"),
        pytest.param(1, "\x01", 30_000, id="one-of-control-characters"),
        pytest.param(60, "x", 1500, id="many-short"),
    ],
)
def test_what_was_held_long_comes_in_bounded_lines_and_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_streams: int, text: str, num_tokens: int
) -> None:
    """As one line it was longer than a gateway takes, and held up all others while it was made."""
    core, turns = stepped(), list[bytes]()
    streams = range(num_streams)
    next_lines = ConnectionStreams.next_lines

    def noted(self: ConnectionStreams) -> bytes:
        turns.append(next_lines(self))
        return turns[-1]

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(*(open_line(number, asked(f"r{number}")) for number in streams))
        await connection.until_admitted(*streams)
        last = num_streams
        await connection.say(*(about("hold", number) for number in streams), open_line(last, {}))
        await connection.until_over(last)
        for _ in range(num_tokens):
            core.step(text)
        core.end()
        monkeypatch.setattr(ConnectionStreams, "next_lines", noted)
        await connection.say(*(about("go_on", number) for number in streams))
        for events in (await connection.until_over(*streams)).values():
            _, told, token_ids, end = joined([None, *events])
            assert told == text * num_tokens
            assert token_ids == list(ids_of(text)) * num_tokens
            assert end["type"] == "finished"

    connected(core, tmp_path, use)
    assert max(map(len, turns)) <= answer_lines.MOST_WRITE_BYTES
    assert max(len(line) for turn in turns for line in turn.splitlines()) <= answer_lines.MOST_DELTA_BYTES + 200


def test_what_its_client_has_closed_already_is_never_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves at once costs no tokenizing: neither of choices that came together, nor of one by one."""
    core, read = stepped(), list[str]()
    parse = GenerateRequest.from_json

    def noted(written: bytes) -> GenerateRequest:
        request = parse(written)
        read.append(request.request_id)
        return request

    monkeypatch.setattr(GenerateRequest, "from_json", noted)

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        opened = [open_line(number, asked(f"r{number}")) for number in range(50)]
        closed = [about("close", number) for number in range(50) if number != 20]
        await connection.say(*opened, *closed)
        await connection.until_admitted(20)
        await connection.say(open_line(50, asked("next")), open_line(51, asked("left")), about("close", 51))
        await connection.until_admitted(50)
        core.step("a")
        core.end()
        await connection.until_over(50)

    connected(core, tmp_path, use)
    assert read == ["r20", "next"]
    assert core.aborted == []


def test_no_more_is_read_than_may_wait_to_be_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexed_answers, "MAX_UNREAD_BYTES", 1000)
    monkeypatch.setattr(multiplexed_answers, "TURN_SECONDS", -1.0)  # one in each turn
    core, most = stepped(), list[int]()
    obey = ConnectionStreams.obey

    def noted(self: ConnectionStreams, line: Any) -> None:
        obey(self, line)
        most.append(self.unread_bytes)

    monkeypatch.setattr(ConnectionStreams, "obey", noted)

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        for number in range(100):
            await connection.say(open_line(number, asked(f"r{number}", "x" * 500)))
        await connection.until_admitted(*range(100))

    connected(core, tmp_path, use)
    assert max(most) < 1000 + 64 * 1024, "more was read than one piece"
    assert [request.request_id for request in core.submitted] == [f"r{number}" for number in range(100)]


def test_long_requests_are_parsed_beside_the_loop_and_no_more_is_read_than_may_wait_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, opened, may_parse = set[str](), list[ConnectionStreams](), threading.Event()
    parse, obey = generation.parse_request, ConnectionStreams.obey

    def noted_parse(written: bytes) -> GenerateRequest:
        threads.add(threading.current_thread().name)
        assert may_parse.wait(60)
        return parse(written)

    def noted(self: ConnectionStreams, line: Any) -> None:
        obey(self, line)
        opened.append(self)

    monkeypatch.setattr(generation, "parse_request", noted_parse)
    monkeypatch.setattr(multiplexed_answers, "MAX_UNREAD_BYTES", 1000)
    monkeypatch.setattr(ConnectionStreams, "obey", noted)
    core, ids = stepped(), range(8)
    long = asked("long") | {"unknown": "x" * 4 * QUICK_LINE_BYTES}

    async def use(client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        saying = [connection.say(open_line(number, long | {"request_id": f"r{number}"})) for number in ids]
        wrong = open_line(8, long | {"sampling": {"max_tokens": -1}})
        said = asyncio.gather(*saying, connection.say(wrong, open_line(9, asked("short"))))
        await until(lambda: bool(opened), "the first is opened")
        for _ in range(20):  # turns of the engine's loop, which is this one
            assert (await client.get("/healthz")).status_code == 200
        assert len(opened) < len(ids), "all of them are read though none is parsed"
        may_parse.set()
        await said
        told = await connection.until_over(8)
        assert told[8][0]["error"]["param"] == "max_tokens"
        await until(lambda: len(core.submitted) == 9, "all others are admitted")

    connected(core, tmp_path, use)
    assert sorted(request.request_id for request in core.submitted) == [*(f"r{number}" for number in ids), "short"]
    assert len(threads) == 1, threads
    assert threads.pop().startswith("bodies")
    assert opened[-1].unread_bytes == 0


def test_a_long_request_that_is_closed_before_it_is_read_counts_no_longer() -> None:
    """Its task never takes its first step; what it counted for would be held against the connection for good."""

    async def run() -> int:
        given_back: list[None] = []
        streams = ConnectionStreams(cast(Generation, None), lambda: None, lambda: given_back.append(None))
        for number in range(5):
            streams.obey(ClientLine(Word.OPEN, number, b"x" * 4 * QUICK_LINE_BYTES))
            assert streams.begin_next()
            streams.obey(ClientLine(Word.CLOSE, number))
        await asyncio.sleep(0)
        assert len(given_back) == 5
        return streams.unread_bytes

    assert asyncio.run(run()) == 0


def test_a_closed_stream_is_aborted_alone_and_says_no_more(tmp_path: Path) -> None:
    core = stepped()

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, asked("leaves")), open_line(1, asked("stays")))
        await connection.until_admitted(0, 1)
        await connection.say(about("close", 0), about("close", 0), about("close", 5), about("go_on", 0))
        await until(lambda: core.aborted == ["leaves"], "an abort")
        core.step("a")
        assert [number for number, _ in await connection.next_write()] == [1]
        core.end()
        await connection.until_over(1)
        # The id is free again, and a number that is over can be closed.
        await connection.say(about("close", 1), open_line(6, asked("leaves")))
        await connection.until_admitted(6)
        core.end()
        await connection.until_over(6)

    connected(core, tmp_path, use)
    assert core.aborted == ["leaves"]


@pytest.mark.parametrize("script", [says_forever, says_nothing], ids=["generating", "queued"])
def test_a_connection_that_is_lost_aborts_all_its_streams_and_no_others(tmp_path: Path, script: Any) -> None:
    core = ScriptedCore(script)

    async def use(client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, asked("stays")))
        async with multiplexed(client) as lost:
            await lost.say(*(open_line(number, asked(f"r{number}")) for number in range(3)))
            while len(core.submitted) < 4:
                await lost.next_write()
        await until(lambda: len(core.aborted) >= 3, f"aborts: {core.aborted}")
        assert sorted(core.aborted) == ["r0", "r1", "r2"]

    connected(core, tmp_path, use)


CASES = [
    pytest.param({"sampling": {"temperature": 9}}, None, id="a-field"),
    pytest.param({"prompt": {"kind": "tokens", "token_ids": [300]}}, None, id="the-vocabulary"),
    pytest.param({"prompt": {"kind": "chat", "messages": [{"content": "x"}]}}, None, id="a-field-within"),
    pytest.param({"prompt": None}, None, id="a-wrong-kind"),
    pytest.param({"request_id": ""}, None, id="the-id"),
    pytest.param({"prompt": {"kind": "text", "text": "x" * (MAX_MODEL_LEN + 1)}}, None, id="the-context"),
    pytest.param({"sampling": {"json_schema": '{"type": 7}'}}, None, id="the-guide"),
    pytest.param({"generated_characters": 4}, None, id="what-was-generated"),
    pytest.param({}, EngineRefusal(ErrorCode.QUEUE_FULL, "9 requests are waiting already", 1.0), id="a-full-queue"),
    pytest.param({}, EngineRefusal(ErrorCode.DRAINING, "this group is draining", 1.0), id="a-drain"),
]


@pytest.mark.parametrize(("change", "refusal"), CASES)
def test_a_refusal_is_that_of_generate_and_its_streams_alone(
    tmp_path: Path, change: dict[str, Any], refusal: EngineRefusal | None
) -> None:
    request = asked("r1") | change

    async def use(client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        alone = await client.post("/v1/generate", json=request)
        assert alone.status_code >= 400, alone.text
        await connection.say(open_line(3, request))
        told = await connection.until_over(3)
        assert told == {3: [{"type": "refused", "error": alone.json()}]}
        core.refusal = None
        await connection.say(open_line(4, asked("r1")))
        await connection.until_admitted(4)

    core = stepped(refusal)
    connected(core, tmp_path, use)


def test_an_id_that_is_in_use_is_refused(tmp_path: Path) -> None:
    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, asked("r1")), open_line(1, asked("r1")))
        told = await connection.until_over(1)
        assert told[1][0]["error"]["param"] == "request_id"

    connected(stepped(), tmp_path, use)


BROKEN = [
    pytest.param(b"{", "begins with no known word", id="no-word"),
    pytest.param(b"dance 3", "begins with no known word", id="an-unknown-word"),
    pytest.param(b"\xff 3", "begins with no known word", id="no-ascii"),
    pytest.param(b"close", "no stream number", id="no-number"),
    pytest.param(b"open -1 {}", "no stream number", id="a-negative-number"),
    pytest.param(b"open 007 {}", "no stream number", id="a-number-written-twice"),
    pytest.param(b"open 3", "too much or too little after 'open'", id="no-request"),
    pytest.param(b"close 3 1", "too much or too little after 'close'", id="a-word-too-many"),
    pytest.param(open_line(2, asked("again")), "stream 2 is opened after stream 2", id="reuse"),
    pytest.param(open_line(1, asked("below")), "stream 1 is opened after stream 2", id="backwards"),
    pytest.param(b"open 1 {", "stream 1 is opened after stream 2", id="backwards-bad"),
    pytest.param(b"x" * LINE_LIMIT_BYTES + b"x", f"longer than {LINE_LIMIT_BYTES} bytes", id="too-long"),
]


@pytest.mark.parametrize(("line", "words"), BROKEN)
def test_a_line_that_says_nothing_known_ends_the_connection(
    tmp_path: Path, line: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    core = stepped()

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, asked("r0")), open_line(2, asked("r2")))
        await connection.until_admitted(0, 2)
        await connection.say(line, open_line(9, asked("r9")))
        assert await connection.rest() == []
        assert connection.is_whole

    connected(core, tmp_path, use)
    assert core.aborted == ["r0", "r2"]
    assert [request.request_id for request in core.submitted] == ["r0", "r2"]
    [said] = [record.getMessage() for record in caplog.records if "the connection of" in record.getMessage()]
    assert "ends with 2 streams" in said
    assert words in said


def test_a_line_without_end_is_not_waited_for_longer_than_a_line_may_be(tmp_path: Path) -> None:
    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        for _ in range(1 + LINE_LIMIT_BYTES // 500_000):
            await connection.say_raw(b" " * 500_000)
        assert await connection.rest() == []
        assert connection.is_whole

    connected(stepped(), tmp_path, use)


def test_lines_come_in_any_pieces(tmp_path: Path) -> None:
    lines = b"".join(open_line(number, asked(f"r{number}")) + b"\n\n" for number in range(3))

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        for start in range(0, len(lines), 7):
            await connection.say_raw(lines[start : start + 7])
        told = await connection.until_over(0, 1, 2)
        assert [joined(told[number])[1] for number in range(3)] == ["ok", "ok", "ok"]

    connected(ScriptedCore(says("ok")), tmp_path, use)


def test_who_shows_no_key_or_comes_from_a_web_page_gets_no_connection(tmp_path: Path) -> None:
    async def run() -> list[bytes]:
        async with serve(ScriptedCore(says("never")), tmp_path, keys=[KEY]) as client:
            heads = []
            for headers in (
                {},
                {"authorization": f"Bearer {KEY}", "content-type": "text/plain"},
                {"authorization": f"Bearer {KEY}", "origin": "http://evil.example"},
                {"authorization": f"Bearer {KEY}"},
                {"authorization": f"Bearer {KEY}", "content-type": "application/json"},
            ):
                async with multiplexed(client, headers) as connection:
                    heads.append(connection.head.split()[1])
            return heads

    assert asyncio.run(run()) == [b"401", b"403", b"403", b"200", b"200"]


def test_a_stream_that_waits_for_its_turn_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_lines, "QUEUED_WORD_SECONDS", 0.01)
    core = ScriptedCore(says_nothing, steps=0)

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(7, asked("r1")))
        await connection.until_admitted(7)
        await until(lambda: core.times_asked_for_steps >= 1, "it looks after the request")
        for steps in (1, 2, 3):
            core.steps = steps
            assert await connection.next_write() == [(7, None)]
        await connection.say(about("close", 7))
        await until(lambda: core.aborted == ["r1"], "an abort")
        core.steps, core.times_asked_for_steps = 4, 0
        await connection.say(open_line(8, asked("r2")))
        await connection.until_admitted(8)

    connected(core, tmp_path, use)


def test_hundreds_of_streams_come_to_their_ends(tmp_path: Path) -> None:
    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(*(open_line(number, asked(f"r{number}")) for number in range(600)))
        told = await connection.until_over(*range(600))
        assert {joined(events)[1] for events in told.values()} == {"some words"}

    connected(ScriptedCore(says("some words")), tmp_path, use)


@pytest.fixture
def slow_guide(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Guides are found good when it is set."""
    is_ready = asyncio.Event()

    async def check(_self: SchemaCheck, _schema: str) -> None:
        await is_ready.wait()

    monkeypatch.setattr(SchemaCheck, "check", check)
    return is_ready


def guided(request_id: str) -> dict[str, Any]:
    return asked(request_id, json_schema="{}")


def test_a_guide_that_takes_long_holds_up_its_own_stream_alone(tmp_path: Path, slow_guide: asyncio.Event) -> None:
    core = ScriptedCore(says("ok"))

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, guided("slow")), about("hold", 0), open_line(1, asked("quick")))
        assert joined((await connection.until_over(1))[1])[1] == "ok"
        await connection.say(about("go_on", 0))
        slow_guide.set()
        assert joined((await connection.until_over(0))[0])[1] == "ok"
        slow_guide.clear()
        # What is held before it is admitted doesn't even say that it was.
        await connection.say(open_line(2, guided("held")), about("hold", 2), open_line(3, asked("quick")))
        await connection.until_over(3)
        slow_guide.set()
        await until(lambda: len(core.submitted) == 4, "it is admitted")
        await connection.say(open_line(4, asked("quick")))
        assert {number for number, _ in await connection.next_write()} == {4}

    connected(core, tmp_path, use)


def test_a_stream_closed_while_its_request_is_read_is_never_begun(tmp_path: Path, slow_guide: asyncio.Event) -> None:
    """Nor one whose connection is lost meanwhile; the ids are free for others."""
    core = ScriptedCore(says("ok"))

    async def use(client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        async with multiplexed(client) as lost:
            await lost.say(open_line(0, guided("lost")), open_line(1, asked("quick")))
            await lost.until_over(1)
        await connection.say(open_line(0, guided("closed")), about("close", 0), open_line(1, asked("quick")))
        await connection.until_over(1)
        slow_guide.set()
        await connection.say(open_line(2, guided("lost")), open_line(3, guided("closed")))
        await connection.until_over(2, 3)

    connected(core, tmp_path, use)
    assert [request.request_id for request in core.submitted] == ["quick", "quick", "lost", "closed"]
    assert core.aborted == []


def test_a_guide_whose_making_is_cancelled_fails_the_streams_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made for all who ask for it; a stream that nobody closed is told its end."""

    async def check(_self: SchemaCheck, _schema: str) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(SchemaCheck, "check", check)

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, guided("r0")), open_line(1, asked("r1")))
        told = await connection.until_over(0, 1)
        assert [event["type"] for event in told[0]] == ["failed"]
        assert joined(told[1])[1] == "ok"

    connected(ScriptedCore(says("ok")), tmp_path, use)


def test_a_drain_while_a_request_is_read_refuses_it(tmp_path: Path, slow_guide: asyncio.Event) -> None:
    async def use(client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, guided("late")), open_line(1, asked("quick")))
        await connection.until_over(1)
        await client.post("/v1/drain")
        slow_guide.set()
        told = await connection.until_over(0)
        assert told[0][0]["error"]["code"] == ErrorCode.DRAINING

    connected(ScriptedCore(says("ok")), tmp_path, use)


def test_a_bug_ends_its_own_stream_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way from the core, while a request is read, or while a line is made."""

    async def play(request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        yield TokenEvent(ids_of("a") if request.request_id != "r1" else (-1,))
        yield FailEvent("It was lost.") if request.request_id == "r2" else EndEvent(FinishReason.LENGTH)

    def unwritable(text: str, *_rest: object) -> bytes:
        if text == "a" and unwritten.pop() == "r0":
            raise OverflowError
        return b'{"type":"delta","text":"a","token_ids":[]}'

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(*(open_line(number, asked(f"r{number}")) for number in range(4)))
        told = await connection.until_over(0, 1, 2, 3)
        assert [told[number][-1]["type"] for number in range(4)] == ["failed", "failed", "failed", "finished"]
        assert "its log says why" in told[0][-1]["message"]
        assert "its log says why" in told[1][-1]["message"]
        assert told[2][-1]["message"] == "It was lost."

    unwritten = ["r3", "r2", "r0"]
    monkeypatch.setattr(answer_lines, "delta_json", unwritable)
    connected(ScriptedCore(play), tmp_path, use)


def test_streams_beyond_the_bound_are_refused_and_who_reads_no_refusals_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_streams, "MOST_STREAMS", 2)
    monkeypatch.setattr(connection_streams, "MOST_UNTOLD", 4)
    core = stepped()

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(*(open_line(number, asked(f"r{number}")) for number in range(3)))
        told = await connection.until_over(2)
        assert told[2][0]["error"]["code"] == ErrorCode.QUEUE_FULL
        held = [line for number in range(3, 6) for line in (open_line(number, {}), about("hold", number))]
        await connection.say(*held)
        await connection.rest()
        assert connection.is_whole

    connected(core, tmp_path, use)
    assert core.aborted == ["r0", "r1"]


def test_a_client_that_stops_reading_gets_tokens_merged_and_loses_none(tmp_path: Path) -> None:
    """So what waits for it is its outputs, once, and not a line for each token."""
    count, finished = 20_000, 0

    async def play(_request: AdmittedRequest) -> AsyncGenerator[CoreEvent]:
        nonlocal finished
        for _ in range(count):
            await asyncio.sleep(0)
            yield TokenEvent(ids_of("x"))
        finished += 1
        yield EndEvent(FinishReason.LENGTH)

    async def run() -> None:
        async with (
            serve(ScriptedCore(play), tmp_path) as client,
            multiplexed(client, receive_buffer_bytes=4096) as connection,
        ):
            await connection.say(*(open_line(number, asked(f"r{number}")) for number in range(3)))
            await until(lambda: finished == 3, "all is generated")
            told = await connection.until_over(0, 1, 2)
            for events in told.values():
                assert joined(events)[1] == "x" * count
                assert len(events) < count / 10
                assert max(len(event.get("token_ids", ())) for event in events) > 1000

    asyncio.run(run())


def test_a_prompt_that_is_told_comes_in_pieces_and_others_between(tmp_path: Path) -> None:
    core = stepped()

    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, asked("long", "x" * 50_000, prompt_told=0)))
        pieces = 0
        while pieces < 3:
            pieces += len([1 for _, event in await connection.next_write() if event["type"] == "prompt"])
        await connection.say(open_line(1, asked("short")))
        types: list[tuple[int, str]] = []
        tokens = pieces * 1024
        while tokens < 50_000:
            write = await connection.next_write()
            told = [event for _, event in write if event["type"] == "prompt"]
            assert len(told) <= 1, "two pieces at once"
            tokens += sum(len(event["tokens"]) for event in told)
            types += [(number, event["type"]) for number, event in write]
        assert types[-1] == (0, "prompt")
        assert (1, "admitted") in types

    connected(core, tmp_path, use)


def test_a_client_that_has_said_all_it_will_reads_its_streams_to_their_ends(tmp_path: Path) -> None:
    async def use(_client: httpx.AsyncClient, connection: MultiplexedClient) -> None:
        await connection.say(open_line(0, asked("r0")), open_line(1, guided("r1")))
        await connection.end_body()
        told = await connection.rest()
        assert connection.is_whole
        assert [number for number, event in told if event["type"] == "finished"] == [0, 1]

    connected(ScriptedCore(says("ok")), tmp_path, use)


def test_a_connection_without_streams_does_not_hold_up_an_engine_that_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One with streams ends with the last of them, be that closed or over."""
    core = stepped()
    order: list[str] = []

    async def ends(connection: MultiplexedClient, name: str) -> None:
        await connection.rest()
        assert connection.is_whole, name
        order.append(name)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            server = serve(core, tmp_path)
            client = await server.__aenter__()
            async with multiplexed(client) as idle, multiplexed(client) as busy, multiplexed(client) as closing:
                await busy.say(open_line(0, asked("busy")))
                await closing.say(open_line(0, asked("closing")))
                await busy.until_admitted(0)
                await closing.until_admitted(0)
                core.start_drain()
                for name, connection in (("idle", idle), ("busy", busy), ("closing", closing)):
                    tasks.create_task(ends(connection, name))
                leaving = tasks.create_task(server.__aexit__(None, None, None))
                await until(lambda: order == ["idle"], f"the idle one ends: {order}")
                await closing.say(about("close", 0))
                await until(lambda: order == ["idle", "closing"], f"the closed one ends: {order}")
                core.step("a")
                core.end()
                await leaving

    asyncio.run(run())
    assert order == ["idle", "closing", "busy"]
    assert core.aborted == ["closing"]
    assert "graceful shutdown exceeded" not in caplog.text
