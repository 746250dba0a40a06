"""A request on a shared connection is read, and refused, as `POST /v1/generate` does it, whatever its bytes are."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from processes.multiplexed_client import MultiplexedClient, multiplexed, open_line
from processes.scripted_core_server import ScriptedCore, says, serve

VALID = {"request_id": "r1", "prompt": {"kind": "text", "text": "hello é"}, "sampling": {"max_tokens": 3}}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["request_id", "prompt", "sampling", "priority", "generated_token_ids", "unknown"])
CHANGED = st.builds(lambda field, value: json.dumps(VALID | {field: value}).encode(), FIELDS, VALUES)
WRITTEN = json.dumps(VALID, ensure_ascii=False).encode()
SPOILED = st.builds(
    lambda at, length, put: WRITTEN[:at] + put + WRITTEN[at + length :],
    st.integers(0, len(WRITTEN)),
    st.integers(0, 4),
    st.binary(max_size=3),
)
REQUESTS = (st.binary() | SPOILED | CHANGED).map(lambda written: written.replace(b"\n", b""))


@dataclass(frozen=True)
class BothWays:
    client: httpx.AsyncClient
    connection: MultiplexedClient
    numbers: Iterator[int]

    async def alone(self, request: bytes) -> list[Any]:
        """The events of `/v1/generate`, its refusal as a stream's only event."""
        answer = await self.client.post("/v1/generate", content=request)
        if answer.status_code == 200:
            return [json.loads(line) for line in answer.text.splitlines() if line]
        return [{"type": "refused", "error": answer.json()}]

    async def shared(self, request: bytes) -> list[Any]:
        number = next(self.numbers)
        await self.connection.say(open_line(number, request))
        return (await self.connection.until_over(number))[number]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(scope="module")
def ways(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    """One server, and one connection that has to outlive all that is asked on it."""
    opened = AsyncExitStack()

    async def begin() -> BothWays:
        client = await opened.enter_async_context(serve(ScriptedCore(says("ok")), tmp_path_factory.mktemp("served")))
        return BothWays(client, await opened.enter_async_context(multiplexed(client)), itertools.count())

    yield runner.run(begin())
    runner.run(opened.aclose())


def merged(events: list[Any]) -> tuple[str, list[Any]]:
    """The deltas' text, and the other events."""
    text = "".join(event["text"] for event in events if event["type"] == "delta")
    return text, [event for event in events if event["type"] != "delta"]


@settings(deadline=None)
@given(written=REQUESTS)
@example(written=b"")
@example(written=b" ")
@example(written=b"\r")
@example(written=WRITTEN)
@example(written=b'{"request_id":"\\ud800"}')
@example(written=WRITTEN[:-1] + b"\xff}")
@example(written=b"[" * 10_000)
def test_any_bytes_are_answered_as_by_themselves(runner: asyncio.Runner, ways: BothWays, written: bytes) -> None:
    async def ask() -> None:
        assert merged(await ways.shared(written)) == merged(await ways.alone(written))

    runner.run(ask())


@pytest.mark.parametrize("depth", [150, 200, 400, 20_000])
def test_a_deeply_nested_tool_is_its_own_streams_matter(runner: asyncio.Runner, ways: BothWays, depth: int) -> None:
    """A parser bounds how deep JSON may be; nothing around the request takes a part of that."""
    nested = '{"a":' * depth + "{}" + "}" * depth
    tool = {"name": "f", "description": "", "parameters": "NESTED"}
    chat = {"kind": "chat", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    request = json.dumps(VALID | {"prompt": chat}).replace('"NESTED"', nested).encode()

    async def ask() -> None:
        first = next(ways.numbers)
        await ways.connection.say(open_line(first, WRITTEN.replace(b"r1", b"other")))
        told = await ways.shared(request)
        assert merged(told) == merged(await ways.alone(request))
        # What can be parsed is refused for what it says: this chat template has no place for tools.
        error = told[0]["error"]
        assert error.get("param") == ("tools" if depth <= 400 else None), error
        assert ("recursion" in error["message"]) == (depth > 400), error
        assert merged(await ways.shared(WRITTEN))[0] == "ok"

    runner.run(ask())
