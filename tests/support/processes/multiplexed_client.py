"""A client of `POST /v1/multiplexed` over a raw socket: lines out, and lines in by the writes that they came in."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import httpx

from stageline_api.multiplexing import MULTIPLEXED_PATH


class MultiplexedClient:
    """One connection. A chunk of the engine's body is one of its writes."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""
        self.head = b""
        self.is_whole = False
        """The engine has ended its body as it should."""

    async def begin(self, host: str, headers: Mapping[str, str]) -> None:
        """Send the request's head, and read that of the answer."""
        given = {"content-type": "application/x-ndjson", "transfer-encoding": "chunked", "host": host} | dict(headers)
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        await self.write(f"POST {MULTIPLEXED_PATH} HTTP/1.1\r\n{head}\r\n".encode())
        while b"\r\n\r\n" not in self._received:
            assert await self._receive(), f"no head: {self._received!r}"
        self.head, _, self._received = self._received.partition(b"\r\n\r\n")

    async def write(self, content: bytes) -> None:
        """Bytes as they are."""
        await asyncio.get_running_loop().sock_sendall(self._socket, content)

    async def say(self, *lines: bytes) -> None:
        """Lines without their ends, in one chunk."""
        await self.say_raw(b"".join(line + b"\n" for line in lines))

    async def say_raw(self, content: bytes) -> None:
        """One chunk."""
        await self.write(b"%x\r\n%b\r\n" % (len(content), content))

    async def end_body(self) -> None:
        """Nothing more is said."""
        await self.write(b"0\r\n\r\n")

    async def next_write(self) -> list[tuple[int, Any]]:
        """What came in one write: streams' numbers and their events, None for a blank line; empty at the end."""
        while (ended := self._received.find(b"\r\n")) < 0:
            if not await self._receive():
                return []
        size = int(self._received[:ended], 16)
        self.is_whole = size == 0
        while len(self._received) < ended + 2 + size + 2:
            assert await self._receive(), "the connection ended within a chunk"
        chunk = self._received[ended + 2 : ended + 2 + size]
        self._received = self._received[ended + 2 + size + 2 :]
        assert not chunk or chunk.endswith(b"\n"), chunk[-80:]
        return [_parsed(line) for line in chunk.splitlines()]

    async def rest(self) -> list[tuple[int, Any]]:
        """All until the engine's body ends."""
        lines = []
        while some := await self.next_write():
            lines += some
        return lines

    async def until_admitted(self, *numbers: int) -> None:
        """Read until each of these has been admitted, and nothing else was told."""
        admitted: list[int] = []
        while len(admitted) < len(numbers):
            some = await self.next_write()
            assert some, f"the body ended with {admitted} of {numbers} admitted"
            assert all(event is not None and event["type"] == "admitted" for _, event in some), some
            admitted += [number for number, _ in some]
        assert sorted(admitted) == sorted(numbers)

    async def until_over(self, *numbers: int) -> dict[int, list[Any]]:
        """What these streams are told until each is over; what others are told meanwhile is dropped."""
        told: dict[int, list[Any]] = {number: [] for number in numbers}
        over: set[int] = set()
        while over != set(numbers):
            some = await self.next_write()
            assert some, f"the body ended before streams {set(numbers) - over} were over: {told}"
            for number, event in some:
                if number not in told:
                    continue
                assert number not in over, f"stream {number} goes on after its end: {event}"
                told[number].append(event)
                if event is not None and event["type"] in ("finished", "failed", "refused"):
                    over.add(number)
        return told

    async def _receive(self) -> bytes:
        some = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
        self._received += some
        return some


@asynccontextmanager
async def multiplexed(
    client: httpx.AsyncClient,
    headers: Mapping[str, str] = MappingProxyType({}),
    *,
    receive_buffer_bytes: int | None = None,
) -> AsyncIterator[MultiplexedClient]:
    """A connection to the server that `client` asks, its head read."""
    with socket.socket() as raw:
        if receive_buffer_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        raw.setblocking(False)
        host, port = client.base_url.host, client.base_url.port
        await asyncio.get_running_loop().sock_connect(raw, (host, port))
        connection = MultiplexedClient(raw)
        await connection.begin(f"{host}:{port}", headers)
        yield connection


def open_line(stream: int, request: dict[str, Any] | bytes) -> bytes:
    """The line that opens it. A request of bytes goes as it is."""
    return b"open %d %b" % (stream, request if isinstance(request, bytes) else json.dumps(request).encode())


def about(word: str, stream: int) -> bytes:
    """A line that closes, holds or goes on with a stream."""
    return f"{word} {stream}".encode()


def _parsed(line: bytes) -> tuple[int, Any]:
    number, _, event = line.partition(b" ")
    return int(number), json.loads(event) if event else None
