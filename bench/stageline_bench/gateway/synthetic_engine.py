"""An engine that computes nothing: `GenerateRequest`s in, tokens at a steady rate out, as cheaply as Python can.

Each stream has a phase of its own, so tokens of many streams are spread over time as a busy engine's are. The first
token comes at once: all of the time to it is the way.
"""

import asyncio
import json
import sys
from typing import Final, cast

from stageline_api.health import EngineStatus, Phase

SERVED_NAME: Final = "synthetic"
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
END: Final = b"0\r\n\r\n"
WORD: Final = " word"


def chunk(content: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


ADMITTED: Final = chunk(b'{"type":"admitted","prompt_tokens":8}\n')
DELTA: Final = chunk(json.dumps({"type": "delta", "text": WORD, "token_ids": [7]}).encode() + b"\n")


class SyntheticStream(asyncio.Protocol):
    """One connection: reads a request, writes its tokens, and takes the next one unless the client said that it is the
    last. The rate is the request's seed: see `rate_of`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self._left = self._tokens = 0
        self._period_seconds = self._due = 0.0
        self._is_last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        """It left, or its stream is done."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes of the request."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or self._transport is None:
            return
        if head.startswith(b"GET "):
            status = EngineStatus(phase=Phase.READY, served_name=SERVED_NAME).model_dump_json().encode()
            length = f"HTTP/1.1 200 OK\r\ncontent-length: {len(status)}\r\nconnection: close\r\n\r\n".encode()
            self._transport.write(length + status)
            self._transport.close()
        elif len(body) >= _content_length(head):
            self._received = b""
            self._is_last = b"connection: close" in head.lower() or b"HTTP/1.0" in head
            self._start(json.loads(body))

    def _start(self, request: dict[str, object]) -> None:
        assert self._transport is not None
        sampling = cast(dict[str, float], request["sampling"])
        self._tokens = self._left = int(sampling["max_tokens"])
        self._period_seconds = 1 / rate_of(int(sampling["seed"]))
        self._transport.write(HEAD + ADMITTED)
        self._due = self._loop.time()
        self._next()

    def _next(self) -> None:
        if self._transport is None:
            return
        self._transport.write(DELTA)
        self._left -= 1
        if not self._left:
            finished = {"type": "finished", "reason": "length", "prompt_tokens": 8, "completion_tokens": self._tokens}
            self._transport.write(chunk(json.dumps(finished).encode() + b"\n") + END)
            if self._is_last:
                self._transport.close()
            return
        self._due += self._period_seconds
        self._timer = self._loop.call_at(self._due, self._next)


def rate_of(seed: int) -> float:
    """Tokens per second of a request: its seed, which is the one number that every client may choose freely."""
    return float(seed)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def serve() -> None:
    """Listen on a free loopback port, print it, serve until killed."""
    server = await asyncio.get_running_loop().create_server(SyntheticStream, "127.0.0.1", 0, backlog=2048)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
