"""An engine's connections: one answer to each request, in turn, whatever a request offers and whatever follows it."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httptools
import httpx
import pytest

from processes.scripted_core_server import ScriptedCore, says, says_forever, serve, serve_state, until
from stageline_api.health import Phase

LAST = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
SMUGGLED = b"POST /v1/drain HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n"
OFFERS = [
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAAAAMAAAAA\r\n",
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n",
    b"connection: upgrade\r\nupgrade: TLS/1.0\r\n",
    b"connection: TE\r\nte: trailers\r\n",
]


class Answers:
    """What came back, as a client reads it."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.body = b""
        self._parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self.body += body

    async def read(self, reader: asyncio.StreamReader, until: Callable[[], bool] = lambda: False) -> None:
        while not until() and (data := await asyncio.wait_for(reader.read(65536), 60)):
            self._parser.feed_data(data)


Use = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def connected(client: httpx.AsyncClient, use: Use) -> None:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    try:
        await use(reader, writer)
    finally:
        writer.close()


def post(body: bytes, offer: bytes = b"") -> bytes:
    head = b"POST /v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%b" % offer
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def asked(text: str) -> bytes:
    return json.dumps({"request_id": "r1", "prompt": {"kind": "text", "text": text}}).encode()


@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_of_another_protocol_is_ignored(tmp_path: Path, offer: bytes) -> None:
    answers, core = Answers(), ScriptedCore(script=says("ok"))

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = post(asked("hello"), offer)
        cut = whole.index(b"\r\n\r\n") + 4
        writer.write(whole[:cut])
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(whole[cut:])
        writer.write(LAST)
        await answers.read(reader)

    async def run() -> None:
        async with serve(core, tmp_path) as client:
            await connected(client, use)

    asyncio.run(run())
    assert answers.statuses == [200, 200], answers.body
    assert b'"type":"delta"' in answers.body


@pytest.mark.parametrize("port", ["engine", "state"])
@pytest.mark.parametrize("offer", OFFERS)
def test_a_body_behind_an_offer_is_no_request_of_its_own(tmp_path: Path, offer: bytes, port: str) -> None:
    answers, core = Answers(), ScriptedCore(script=says("ok"))

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = post(SMUGGLED, offer)
        cut = whole.index(b"\r\n\r\n") + 4
        writer.write(whole[:cut])
        await until(lambda: writer.transport.get_write_buffer_size() == 0, "it was sent")
        writer.write(whole[cut:])
        await answers.read(reader, lambda: bool(answers.statuses))
        writer.write(LAST)
        await answers.read(reader)

    async def run() -> None:
        async with serve(core, tmp_path) if port == "engine" else serve_state(core) as client:
            await connected(client, use)

    asyncio.run(run())
    assert answers.statuses == [400 if port == "engine" else 404, 200], answers.body
    assert core.phase is Phase.READY, "the body was taken as a request to drain"


def test_a_refusal_follows_the_stream_before_it(tmp_path: Path) -> None:
    answers, core = Answers(), ScriptedCore(script=says_forever)

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(post(asked("hello")))
        await answers.read(reader, lambda: b"delta" in answers.body)
        writer.write(b"\x00garbage\r\n\r\n")
        length = len(answers.body)
        await answers.read(reader, lambda: len(answers.body) > length + 500 or len(answers.statuses) > 1)

    async def run() -> None:
        async with serve(core, tmp_path) as client:
            await connected(client, use)

    asyncio.run(run())
    assert answers.statuses == [200], answers.body[-300:]


def test_a_header_that_names_an_address_changes_nothing(tmp_path: Path) -> None:
    async def run() -> list[int]:
        async with serve(ScriptedCore(script=says("ok")), tmp_path, keys=("some-key-0123456789",)) as client:
            headers = {"x-forwarded-for": "127.0.0.1", "x-forwarded-proto": "https"}
            return [(await client.post("/v1/drain", headers=headers)).status_code]

    assert asyncio.run(run()) == [401]
