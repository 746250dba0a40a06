"""Large bodies are worked on one at a time, off the event loop: several at once would each hold it up."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import ScriptedEngine
from stageline_gateway.admission import body_sizes, request_body
from stageline_gateway.endpoints import completions
from stageline_gateway.large_work import QUICK_BYTES, THREAD_NAME, LargeWork, off_the_loop
from stageline_runtime.engine.edge.generation import LARGE, ReadingThreads

CLIENTS: Final = 16
MANY: Final = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": ""}] * 4096}


class Counted:
    """How many threads are in a function at once at most, and their names."""

    def __init__(self) -> None:
        self.most = self.calls = 0
        self.names: set[str] = set()
        self._now = 0
        self._lock = threading.Lock()

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            with self._lock:
                self._now += 1
                self.calls += 1
                self.most = max(self.most, self._now)
                self.names.add(threading.current_thread().name)
            try:
                return work(*given)
            finally:
                with self._lock:
                    self._now -= 1

        return counted


def test_however_many_send_large_bodies_one_is_parsed_or_checked_at_a_time(
    gateway: RunningGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    for module, name in ((request_body, "shape_of"), (request_body, "parse_object"), (completions, "prepare_chat")):
        monkeypatch.setattr(module, name, counted.around(getattr(module, name)))
    content, headers = json.dumps(MANY).encode(), {"content-type": "application/json"}

    def ask(_: int) -> int:
        return gateway.http.post("/v1/chat/completions", content=content, headers=headers).status_code

    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = list(pool.map(ask, range(CLIENTS)))
    assert set(statuses) <= {200, 503}, statuses
    assert statuses.count(200) == len(engine.requests) > 0
    assert counted.calls > CLIENTS
    assert counted.most == 1
    assert {name.rpartition("_")[0] for name in counted.names} == {THREAD_NAME}


def test_what_is_small_needs_no_thread() -> None:
    async def run() -> tuple[str, str]:
        def name() -> str:
            return threading.current_thread().name

        return await off_the_loop(QUICK_BYTES, name), await off_the_loop(QUICK_BYTES + 1, name)

    here, beside = asyncio.run(run())
    assert here == threading.current_thread().name
    assert beside.startswith(THREAD_NAME)


def test_room_is_asked_for_when_the_turn_has_come_and_what_has_none_is_not_begun() -> None:
    large, done, going = LargeWork(), list[str](), threading.Event()

    def refuse() -> None:
        done.append("asked")
        raise ValueError("no room")

    async def run() -> None:
        first = asyncio.create_task(large.run(lambda: done.append(f"first {going.wait(60)}")))
        second = asyncio.create_task(large.run(lambda: done.append("second"), refuse))
        third = asyncio.create_task(large.run(lambda: done.append("third")))
        await asyncio.sleep(0)
        assert done == []
        going.set()
        with pytest.raises(ValueError, match="no room"):
            await second
        await asyncio.gather(first, third)

    asyncio.run(run())
    large.close()
    assert done == ["first True", "asked", "third"]


def test_what_holds_more_goes_before_what_has_not_begun() -> None:
    large, done = LargeWork(), list[str]()

    async def run() -> None:
        begins = [asyncio.create_task(large.run(lambda: done.append("begins"), begins=True)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.gather(*begins, *(large.run(lambda: done.append("goes on")) for _ in range(3)))

    asyncio.run(run())
    large.close()
    assert done[2:5].count("goes on") >= 2, done
    assert sorted(done) == ["begins"] * 5 + ["goes on"] * 3


def test_a_turn_that_nobody_waits_for_any_more_still_has_no_other_beside_it() -> None:
    large, counted, going = LargeWork(), Counted(), threading.Event()

    async def run() -> None:
        began = asyncio.Event()
        first = asyncio.create_task(large.run(counted.around(lambda: going.wait(60)), began.set))
        await began.wait()
        first.cancel()
        others = [asyncio.create_task(large.run(counted.around(lambda: None))) for _ in range(5)]
        await asyncio.sleep(0)
        going.set()
        await asyncio.gather(first, *others, return_exceptions=True)

    asyncio.run(run())
    large.close()
    assert (counted.calls, counted.most) == (6, 1)
    with pytest.raises(RuntimeError):
        asyncio.run(large.run(lambda: None))


def test_an_engine_reads_large_prompts_in_one_thread_and_the_rest_in_another() -> None:
    threads, large, rest = ReadingThreads(), Counted(), Counted()

    async def run() -> None:
        each = [(LARGE + 1, large), (LARGE, rest), (0, rest)] * CLIENTS
        await asyncio.gather(*(threads.run(size, counted.around(lambda: None)) for size, counted in each))

    asyncio.run(run())
    assert (large.most, rest.most) == (1, 1)
    assert (len(large.names), len(rest.names), len(large.names | rest.names)) == (1, 1, 2)


def filled(before: str, part: str, after: str) -> bytes:
    """A body of as many `part`s as are not large by their bytes."""
    count = (QUICK_BYTES // 2 - len(before) - len(after)) // (len(part) + 1)
    return (before + ",".join([part] * count) + after).encode()


CALL: Final = '{"id":"1","type":"function","function":{"name":"f","arguments":"%s"}}'
TOOL: Final = '{"type":"function","function":{"name":"f","parameters":{"a":[%s]}}}'
OF_MANY_PARTS: Final[dict[str, tuple[str, bytes]]] = {
    "messages": ("/v1/chat/completions", filled('{"user":"u","messages":[', '{"role":"user","content":""}', "]}")),
    "parts of messages": (
        "/v1/chat/completions",
        filled('{"messages":[', '{"role":"user","content":[{"type":"text","text":""}]}', "]}"),
    ),
    "calls": (
        "/v1/chat/completions",
        filled('{"messages":[', '{"role":"assistant","tool_calls":[%s]}' % (CALL % "{}"), "]}"),
    ),
    "tools": (
        "/v1/chat/completions",
        filled('{"messages":[{"role":"user","content":"x"}],"tools":[', TOOL % ",".join(["{}"] * 60), "]}"),
    ),
    "what one call's arguments hold": (
        "/v1/chat/completions",
        filled(
            f'{{"model":"{MODEL}","messages":[{{"role":"assistant","tool_calls":['
            + CALL.partition("%s")[0]
            + '{\\"a\\":[',
            "{}",
            ']}"}}]}]}',
        ),
    ),
    "ids": ("/v1/completions", filled('{"prompt":[', "1", "]}")),
    "turns of Anthropic's clients": (
        "/v1/messages",
        filled('{"max_tokens":1,"messages":[', '{"role":"user","content":""}', "]}"),
    ),
    "items of a response": ("/v1/responses", filled('{"input":[', '{"role":"user","content":""}', "]}")),
}


@pytest.mark.parametrize("name", OF_MANY_PARTS)
def test_a_body_of_few_bytes_and_many_parts_is_parsed_and_checked_off_the_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, body = OF_MANY_PARTS[name]
    assert len(body) <= QUICK_BYTES, "its bytes would do"
    beside, on_loop = list[str](), list[str]()
    parse, work = body_sizes.shape_with_written, body_sizes.held_text_bytes

    def parsing(*given: Any) -> Any:
        (beside if threading.current_thread().name.startswith(THREAD_NAME) else on_loop).append("parsed")
        return parse(*given)

    def making(*given: Any) -> Any:
        beside.append("made")
        return work(*given)

    monkeypatch.setattr(request_body, "shape_with_written", parsing)
    monkeypatch.setattr(request_body, "held_text_bytes", making)
    gateway.http.post(path, content=body, headers={"content-type": "application/json"})
    if name == "what one call's arguments hold":  # known once it is parsed
        assert (on_loop, beside) == (["parsed"], ["made"])
    else:
        assert on_loop == [], beside
        assert "parsed" in beside


def test_a_usual_chat_with_tools_needs_no_thread(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    names = list[str]()
    parse = body_sizes.shape_with_written

    def parsing(*given: Any) -> Any:
        names.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(request_body, "shape_with_written", parsing)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    turns = [{"role": "user", "content": "if (a) { b[0] = {}; }\n" * 200}] * 8
    body = {"model": MODEL, "messages": turns, "tools": [tool] * 8}
    assert len(json.dumps(body)) > 20_000
    gateway.http.post("/v1/chat/completions", json=body)
    assert names
    assert not any(name.startswith(THREAD_NAME) for name in names), names
