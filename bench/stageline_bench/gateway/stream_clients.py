"""Many clients that stream without pause, and their times; a separate process, so that it disturbs no other.

Each concurrent client sends its next request as soon as its stream has ended. Starts are spread over one stream's
length. Responses are only searched for the bytes of a token: parsing would cost more than relaying.
"""

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import cast


@dataclass(frozen=True)
class Load:
    """The clients' requests, and the duration."""

    port: int
    path: str
    body: dict[str, object]
    concurrent: int
    tokens: int
    tokens_per_second: float
    seconds: float
    token_mark: str
    """Bytes that occur once per token, even if one event has several tokens."""


@dataclass
class Seen:
    """Times of all complete streams."""

    first_token_seconds: list[float] = field(default_factory=list)
    gap_seconds: list[float] = field(default_factory=list)
    """Between two reads with tokens, minus the engine's period."""
    streams: int = 0
    broken: int = 0
    seconds: float = 0.0


class _Client(asyncio.Protocol):
    def __init__(self, load: Load, request: bytes, seen: Seen) -> None:
        self._load, self._request, self._seen = load, request, seen
        self._mark = load.token_mark.encode()
        self._loop = asyncio.get_running_loop()
        self._tokens = 0
        self._rest = b""
        self._last = 0.0
        self._began = self._loop.time()
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        text = self._rest + data
        count = text.count(self._mark)
        # A mark that is split is found with the next bytes; a complete one must not be found again.
        self._rest = text[text.rfind(self._mark) + len(self._mark) :] if count else text
        self._rest = self._rest[-len(self._mark) + 1 :]
        if not count:
            return
        if not self._tokens:
            self._seen.first_token_seconds.append(now - self._began)
        else:
            self._seen.gap_seconds.append(now - self._last - 1 / self._load.tokens_per_second)
        self._last = now
        self._tokens += count

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        whole = self._tokens == self._load.tokens
        self._seen.streams += whole
        self._seen.broken += not whole
        if not self.ended.done():
            self.ended.set_result(None)


async def run(load: Load) -> Seen:
    """Load for `load.seconds`; streams that are still running may finish but don't count for throughput."""
    body = json.dumps(load.body).encode()
    head = f"POST {load.path} HTTP/1.1\r\nhost: 127.0.0.1:{load.port}\r\nconnection: close\r\n"
    head += "content-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    loop, seen = asyncio.get_running_loop(), Seen()
    began = loop.time()

    async def client(offset_seconds: float) -> None:
        await asyncio.sleep(offset_seconds)
        while loop.time() - began < load.seconds:
            _, protocol = await loop.create_connection(lambda: _Client(load, request, seen), "127.0.0.1", load.port)
            await protocol.ended

    length_seconds = load.tokens / load.tokens_per_second
    await asyncio.gather(*(client(length_seconds * index / load.concurrent) for index in range(load.concurrent)))
    seen.seconds = loop.time() - began
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(asyncio.run(run(Load(**json.loads(sys.argv[1])))))))
