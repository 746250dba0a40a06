"""An engine without a model: `GenerateRequest`s in, tokens at a steady rate out, as cheaply as Python can.

Tokens arrive in steps, as from a real engine: a stream belongs to one of `COHORTS` microbatches with alternating steps,
and each step has a token for every stream of its microbatch. On a shared connection, the tokens of a step are one
write. The first token is sent at once: its latency is only that of the relay.
"""

import asyncio
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from stageline_api.multiplexing import Word
from stageline_bench.gateway.engine_words import (
    ADMITTED,
    END,
    HEAD,
    SHARED,
    TOKEN,
    SharedBody,
    chunk,
    finished,
    of_stream,
    status,
)

COHORTS: Final = 4
SHORTEST_STEP_SECONDS: Final = 1e-3


@dataclass(eq=False)
class Stream:
    """One generation, and the destination of its lines."""

    write: Callable[[bytes], None]
    number: int | None
    tokens: int
    period_seconds: float
    on_end: Callable[[], None]
    left: int = 0
    is_open: bool = True

    def next_lines(self) -> bytes:
        """The lines of its next token."""
        self.left -= 1
        return of_stream(self.number, TOKEN) + (b"" if self.left else of_stream(self.number, finished(self.tokens)))


class Steps:
    """Gives each stream a token in every step of its microbatch."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, list[Stream]] = {}
        """Streams by the step of their next token, counted in shortest steps."""

    def start(self, stream: Stream) -> None:
        """Admit it, with its first token."""
        stream.left = stream.tokens
        self._say(stream, of_stream(stream.number, ADMITTED) + stream.next_lines())
        cohort_seconds = max(stream.period_seconds / COHORTS, SHORTEST_STEP_SECONDS)
        steps = round(cohort_seconds / SHORTEST_STEP_SECONDS)
        due = math.ceil((self._loop.time() + stream.period_seconds) / SHORTEST_STEP_SECONDS / steps) * steps
        self._await(due, [stream])

    def _await(self, due: int, streams: list[Stream]) -> None:
        if due not in self._due:
            self._due[due] = []
            self._loop.call_at(due * SHORTEST_STEP_SECONDS, self._step, due)
        self._due[due] += streams

    def _step(self, due: int) -> None:
        written: dict[Callable[[bytes], None], list[bytes]] = {}
        again: dict[int, list[Stream]] = {}
        for stream in self._due.pop(due):
            if not stream.is_open:
                continue
            written.setdefault(stream.write, []).append(stream.next_lines())
            if stream.left:
                period = max(1, round(stream.period_seconds / SHORTEST_STEP_SECONDS))
                again.setdefault(due + period, []).append(stream)
            else:
                self._loop.call_soon(stream.on_end)
        for write, lines in written.items():
            write(chunk(b"".join(lines)))
        for next_due, streams in again.items():
            self._await(next_due, streams)

    def _say(self, stream: Stream, lines: bytes) -> None:
        stream.write(chunk(lines))
        if not stream.left:
            stream.on_end()


class SyntheticConnection(asyncio.Protocol):
    """Serves one request after another, unless the client closes the connection, or many at once. The rate is the
    request's seed: see `rate_of`.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._shared: SharedBody | None = None
        self._streams: dict[int | None, Stream] = {}
        self._is_last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connection opened."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """Connection closed: the client disconnected or its stream is done."""
        self._transport = None
        for stream in self._streams.values():
            stream.is_open = False

    def data_received(self, data: bytes) -> None:
        """Received bytes of a request."""
        if self._shared is not None:
            self._take(self._shared, data)
            return
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or self._transport is None:
            return
        if head.startswith(SHARED):
            self._shared = SharedBody()
            self._transport.write(HEAD)
            self._take(self._shared, body)
        elif head.startswith(b"GET "):
            self._transport.write(status())
            self._transport.close()
        elif len(body) >= _content_length(head):
            self._received = b""
            self._is_last = b"connection: close" in head.lower() or b"HTTP/1.0" in head
            self._transport.write(HEAD)
            self._start(None, json.loads(body))

    def _take(self, shared: SharedBody, data: bytes) -> None:
        for line in shared.feed(data):
            if line.word is Word.OPEN:
                self._start(line.stream, json.loads(line.request))
            elif line.word is Word.CLOSE and (stream := self._streams.pop(line.stream, None)) is not None:
                stream.is_open = False

    def _start(self, number: int | None, request: dict[str, Any]) -> None:
        sampling = request["sampling"]
        period_seconds = 1 / rate_of(int(sampling["seed"]))
        stream = Stream(self._write, number, int(sampling["max_tokens"]), period_seconds, lambda: self._ended(number))
        self._streams[number] = stream
        self._steps.start(stream)

    def _write(self, content: bytes) -> None:
        if self._transport is not None:
            self._transport.write(content)

    def _ended(self, number: int | None) -> None:
        self._streams.pop(number, None)
        if number is None and self._transport is not None:
            self._transport.write(END)
            if self._is_last:
                self._transport.close()


def rate_of(seed: int) -> float:
    """Tokens per second of a request: its seed, the one number that every client can choose freely."""
    return float(seed)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def serve() -> None:
    """Listen on a free loopback port, print it, serve until killed."""
    steps = Steps()
    server = await asyncio.get_running_loop().create_server(
        lambda: SyntheticConnection(steps), "127.0.0.1", 0, backlog=2048
    )
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
