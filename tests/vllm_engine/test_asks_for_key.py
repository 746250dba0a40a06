"""The middleware of vLLM's server: who shows the key gets through, anybody else nothing, on any path by any means."""

import asyncio
from typing import Any

import pytest

from stageline_vllm.plugin.asks_for_key import AsksForKey
from stageline_vllm.server_key import KEY_VARIABLE

KEY = "k" * 64
SHOWN = (b"authorization", b"Bearer " + KEY.encode())


def asked(kind: str, *headers: tuple[bytes, bytes], **scope: Any) -> tuple[bool, list[Any]]:
    """Whether the application was reached, and what the middleware itself has sent."""
    reached: list[Any] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append((scope, receive, send))

    async def receive() -> Any:
        raise AssertionError("nothing is read for a stranger")

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"type": kind, "headers": headers, "path": "/health", **scope}
    asyncio.run(AsksForKey(app, {KEY_VARIABLE: KEY})(given, receive, send))
    assert not reached or reached == [(given, receive, send)], "what passes does so untouched"
    return bool(reached), sent


def test_who_shows_the_key_gets_through() -> None:
    for kind in ("http", "websocket"):
        assert asked(kind, (b"host", b"x"), SHOWN) == (True, [])


@pytest.mark.parametrize(
    "headers",
    [(), ((b"authorization", KEY.encode()),), ((b"authorization", b"Bearer "),), ((b"x-api-key", KEY.encode()),),
     (SHOWN, (b"authorization", b"Bearer x")), ((b"authorization", b"Bearer \xff"),)],
    ids=ascii,
)  # fmt: skip
def test_a_stranger_gets_nothing(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    reached, sent = asked("http", *headers, method="OPTIONS")
    assert not reached
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert (sent[0]["status"], sent[1]["body"]) == (401, b'{"error":"Unauthorized"}')
    assert asked("websocket", *headers) == (False, [{"type": "websocket.close", "code": 1008}])


def test_the_servers_own_life_asks_for_nothing() -> None:
    assert asked("lifespan") == (True, [])


@pytest.mark.parametrize("environ", [{}, {KEY_VARIABLE: ""}])
def test_without_a_key_there_is_no_server(environ: dict[str, str]) -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("it answers")

    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        AsksForKey(app, environ)
