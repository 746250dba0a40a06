"""`python -m stageline_bench.gateway.lock_step`: relays' CPU time per request and per token, even on a loaded machine.

One stream at a time: an engine and a client in this process wait for each other's every write, and the scheduler
reports the relay's CPU time. Scheduling delays don't matter, so load changes the lowest of several windows only by a
few percent. It does not measure waiting: `make bench-gateway` does.
"""

import json
import queue
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click

from stageline_api.multiplexing import Word
from stageline_bench.benchmark_program import run_benchmark
from stageline_bench.gateway import relays
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
from stageline_bench.gateway.figures import request_body

PATIENCE_SECONDS: Final = 60.0
IDLE_SECONDS: Final = 4.0
LONG: Final = 51
BURST: Final = 5


@dataclass(frozen=True)
class Asked:
    """A request that the engine holds until it is answered."""

    connection: socket.socket
    stream: int | None = None
    """Its number on a shared connection; None: it has its own connection."""
    answered: threading.Event = field(default_factory=threading.Event)

    def say(self, line: bytes, times: int = 1) -> None:
        """Write a line `times` times, in one write."""
        self.connection.sendall(chunk(of_stream(self.stream, line) * times))

    def end(self, tokens: int) -> None:
        """All requested tokens have been sent."""
        self.say(finished(tokens))
        if self.stream is None:
            self.connection.sendall(END)
        self.answered.set()


class HeldEngine:
    """Answers probes automatically, and puts each generation request into `asked`."""

    def __init__(self) -> None:
        self.asked: queue.Queue[Asked] = queue.Queue()
        self._status = status()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb") as stream:
            while head := b"".join(iter(stream.readline, b"\r\n")):
                if head.startswith(b"GET "):
                    connection.sendall(self._status)
                    return
                connection.sendall(HEAD)
                if head.startswith(SHARED):
                    self._share(connection)
                    return
                stream.read(int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0]))
                asked = Asked(connection)
                self.asked.put(asked)
                asked.answered.wait()

    def _share(self, connection: socket.socket) -> None:
        body = SharedBody()
        while came := connection.recv(65536):
            for line in body.feed(came):
                if line.word is Word.OPEN:
                    self.asked.put(Asked(connection, line.stream))


@dataclass(frozen=True)
class Stream:
    """One relayed stream, token after token."""

    engine: HeldEngine
    relay: relays.Relay
    idle_share: float = 0.0
    """Share of a core that the relay uses without a stream: probes of the engine, checks of files."""

    def run(self, tokens: int, burst: int) -> None:
        """Have `tokens` relayed, `burst` of them in one write."""
        body = json.dumps(request_body(self.relay.path, tokens, 25)).encode()
        head = f"POST {self.relay.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.relay.port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(head.encode() + body)
            asked = self.engine.asked.get(timeout=PATIENCE_SECONDS)
            asked.say(ADMITTED)
            self._relay_tokens(client, asked, tokens, burst)
            asked.end(tokens)
            while client.recv(65536):
                pass

    def _relay_tokens(self, client: socket.socket, asked: Asked, tokens: int, burst: int) -> None:
        mark, seen, sent = relays.TOKENS_MARK[self.relay.path].encode(), b"", 0
        while sent < tokens:
            count = min(burst, tokens - sent)
            asked.say(TOKEN, count)
            sent += count
            while seen.count(mark) < sent:
                came = client.recv(65536)
                assert came, seen
                seen += came

    def microseconds(self, streams: int, tokens: int, burst: int) -> float:
        """The relay's CPU time for one such stream, without its idle work."""
        before, began = _nanoseconds(self.relay), time.monotonic_ns()
        for _ in range(streams):
            self.run(tokens, burst)
        idle = self.idle_share * (time.monotonic_ns() - began)
        return (_nanoseconds(self.relay) - before - idle) / streams / 1e3


def _nanoseconds(relay: relays.Relay) -> int:
    """CPU time of the only busy thread of each process; see `schedstat` in Linux's documentation of /proc."""
    return sum(int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) for pid in relay.pids)


Start = Callable[[int, int, Path], AbstractContextManager[relays.Relay | None]]
RELAYS: Final[tuple[Start, ...]] = (relays.gateway, relays.nginx)


def idle_share(relay: relays.Relay) -> float:
    """Share of a core that it uses without a stream."""
    before, began = _nanoseconds(relay), time.monotonic_ns()
    time.sleep(IDLE_SECONDS)
    return (_nanoseconds(relay) - before) / (time.monotonic_ns() - began)


def measure(streams: Sequence[Stream], windows: int) -> list[dict[str, tuple[float, float]]]:
    """Lowest and median over the windows, in microseconds. The relays alternate, so that all have the same load."""
    for stream in streams:
        for _ in range(40):
            stream.run(5, 1)
    taken: list[tuple[list[float], list[float], list[float]]] = [([], [], []) for _ in streams]
    for _ in range(windows):
        for stream, (short, long, bursts) in zip(streams, taken, strict=True):
            short.append(stream.microseconds(12, 1, 1))
            long.append(stream.microseconds(4, LONG, 1))
            bursts.append(stream.microseconds(8, LONG - 1, BURST))
    return [_summary(*each) for each in taken]


def _summary(short: list[float], long: list[float], bursts: list[float]) -> dict[str, tuple[float, float]]:
    ends = [(min(each), statistics.median(each)) for each in (short, long, bursts)]
    of_token = (ends[1][0] - ends[0][0]) / (LONG - 1), (ends[1][1] - ends[0][1]) / (LONG - 1)
    return {"stream of one token": ends[0], "one more token": of_token, "50 tokens by fives": ends[2]}


@click.command()
@click.option("--windows", type=click.IntRange(2), default=15, show_default=True)
def bench(windows: int) -> None:
    """CPU time of the gateway, and of nginx if it is installed."""
    engine = HeldEngine()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        directory = Path(scratch)
        started = [stack.enter_context(start(engine.port, relays.free_port(), directory)) for start in RELAYS]
        found = [each for each in started if each is not None]
        time.sleep(IDLE_SECONDS)  # let one-time work after the start finish
        streams = [Stream(engine, each, idle_share(each)) for each in found]
        for relay, figures in zip(found, measure(streams, windows), strict=True):
            for what, (lowest, median) in figures.items():
                click.echo(f"{relay.name}: {what}: {lowest:.1f} µs lowest, {median:.1f} median")


if __name__ == "__main__":
    run_benchmark(bench)
