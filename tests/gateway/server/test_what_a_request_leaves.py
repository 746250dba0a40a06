"""A request leaves nothing to the garbage collector: what it held is free when it is over, and no cycle keeps it.

The collector comes seldom, since it would walk all open streams; a cycle would hold a request's body meanwhile, beyond
every limit on memory. Looked for are objects and frames of the gateway and its server, whoever else leaves some.
"""

import asyncio
import gc
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import pytest

from processes.gateway_harness import MODEL, RunningGateway, eventually
from processes.scripted_engine import Drop, Hold, Raw, Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import Admitted, Delta, EngineError, ErrorCode, Failed, GenerateRequest
from stageline_gateway.engine_client.engine_connections import get
from stageline_gateway.engine_trust import EngineAddress, EngineTrust

TIMES = 5
OURS = ("stageline_gateway", "uvicorn", "httptools", "starlette", "httpx._client.BoundAsyncStream")
"""Whose objects are looked for. The last is of what the gateway asks engines in whole; tests have the other one."""
BEGUN: list[Step] = [Say(Admitted(prompt_tokens=1)), Say(Delta(text="a", token_ids=(1,)))]
NO_ROOM = Refuse(429, EngineError(code=ErrorCode.QUEUE_FULL, message="no room"))
RUBBISH = Raw(b"rubbish\n")
FAILED = Say(Failed(message="it failed", is_final=True))
PLAIN = {"model": MODEL, "prompt": "x"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def name_of(one: object) -> str:
    if isinstance(one, FrameType):
        return f"{one.f_globals.get('__name__')}.{one.f_code.co_name}"
    return f"{type(one).__module__}.{type(one).__name__}"


@contextmanager
def nothing_left(settled: Callable[[], object]) -> Iterator[None]:
    """Fail when the context leaves cycles of the gateway's; `settled` waits until it has ended with all of it."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        settled()
        gc.collect()
        found = Counter(name for name in map(name_of, gc.garbage) if name.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found, dict(found)


def request(path: str, body: dict[str, Any] | bytes, *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = ("host: 127.0.0.1", "content-type: application/json", f"content-length: {len(content)}", *headers)
    return "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + content


def connected(gateway: RunningGateway) -> socket.socket:
    parts = urlsplit(gateway.url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)


def post(gateway: RunningGateway, path: str, body: dict[str, Any] | bytes) -> int:
    """The status, on a connection of its own, which ends with it. Not by httpx, which leaves cycles of its own."""
    with connected(gateway) as client:
        client.sendall(request(path, body, "connection: close"))
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    return int(answer.split()[1])


def leave_midway(gateway: RunningGateway, *ahead: bytes) -> None:
    """Ask for a stream, send `ahead` behind it, and go away when it has begun."""
    with connected(gateway) as client:
        client.sendall(b"".join((request("/v1/completions", PLAIN | {"stream": True}), *ahead)))
        assert client.recv(15).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("path", "body", "script", "status"),
    [
        pytest.param("/v1/completions", PLAIN, answer("a", "b"), 200, id="whole"),
        pytest.param("/v1/completions", PLAIN | {"stream": True}, answer("a", "b"), 200, id="streamed"),
        pytest.param("/v1/chat/completions", CHAT | {"stream": True}, answer("a", "b"), 200, id="streamed chat"),
        pytest.param("/v1/chat/completions", CHAT | {"logprobs": True}, answer("a"), 200, id="the general way"),
        pytest.param(
            "/v1/responses", {"model": MODEL, "input": "hi", "stream": True}, answer("a"), 200, id="responses"
        ),
        pytest.param("/v1/messages", CHAT | {"max_tokens": 5}, answer("a"), 200, id="messages"),
        pytest.param("/v1/completions", PLAIN | {"temperature": 9}, [], 400, id="a bad field"),
        pytest.param("/v1/chat/completions", CHAT | {"messages": [1] * 100_000}, [], 400, id="a large bad body"),
        pytest.param("/v1/completions", b"{", [], 400, id="not JSON"),
        pytest.param("/v1/completions", PLAIN | {"model": "other"}, [], 404, id="an unknown model"),
        pytest.param("/v1/completions", PLAIN, [NO_ROOM], 503, id="an engine that refuses"),
        pytest.param("/v1/completions", PLAIN | {"n": 3}, [NO_ROOM], 503, id="an engine that refuses all of several"),
        pytest.param("/tokenize", PLAIN, [], 200, id="tokenizing"),
        pytest.param("/v1/messages/count_tokens", CHAT, [], 200, id="counting tokens"),
        pytest.param("/v1/completions", PLAIN | {"stream": True}, [*BEGUN, Drop()], 200, id="an engine that is lost"),
        pytest.param("/v1/completions", PLAIN | {"stream": True}, [*BEGUN, RUBBISH], 200, id="an engine that errs"),
        pytest.param("/v1/completions", PLAIN, [*BEGUN, FAILED], 400, id="an answer that fails"),
        pytest.param(
            "/v1/completions",
            PLAIN | {"stream": True, "logprobs": 1},
            [*BEGUN, Drop()],
            200,
            id="by its own connection",
        ),
    ],
)
def test_a_request_is_freed_when_it_is_over(
    gateway: RunningGateway,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any] | bytes,
    script: list[Step],
    status: int,
) -> None:
    engine.script = lambda _: script
    engine.replies["POST /v1/tokenize"] = (200, '{"token_ids": [1, 2], "max_model_len": 100}')
    eventually(lambda: engine.num_probes > 1, "nobody knows yet that requests may share a connection")
    assert post(gateway, path, body) == status  # the first makes what stays
    gateway.settle()
    with nothing_left(gateway.settle):
        assert [post(gateway, path, body) for _ in range(TIMES)] == [status] * TIMES


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_a_client_that_left_is_forgotten(gateway: RunningGateway, engine: ScriptedEngine, num_ahead: int) -> None:
    def script(_: GenerateRequest) -> list[Step]:
        return [*BEGUN, Hold()]

    engine.script = script
    ahead = [request("/v1/completions", PLAIN)] * num_ahead
    leave_midway(gateway, *ahead)
    gateway.settle()
    with nothing_left(gateway.settle):
        for _ in range(TIMES):
            leave_midway(gateway, *ahead)


def test_a_question_that_broke_is_forgotten() -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            with nothing_left(lambda: None):
                for _ in range(TIMES):
                    with pytest.raises(OSError, match="broke"):
                        await get(EngineTrust(), EngineAddress(f"http://{host}:{port}", ""), "/v1/status", "")
                await asyncio.sleep(0)

    asyncio.run(ask())
