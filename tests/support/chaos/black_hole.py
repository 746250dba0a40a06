"""A TCP proxy that can stop forwarding, as a machine does that vanished: nothing answers, and nothing breaks either.

It listens on loopback in a thread. Swallowed connections stay open and new ones are accepted, but no byte passes in
either direction until `restore`; what was sent meanwhile then arrives.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class BlackHole:
    """Before the server at `target`; call `start`, use `url`, call `stop`."""

    target: str
    url: str = ""
    opened_at: list[float] = field(default_factory=list)
    """When connections were opened, by `time.monotonic`."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _forwards: asyncio.Event = field(default_factory=asyncio.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen on a free loopback port."""
        started = threading.Event()
        self._forwards.set()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(60), "the proxy did not start"

    def swallow(self) -> float:
        """Forward nothing from now on; returns when that was, by `time.monotonic`."""
        asyncio.run_coroutine_threadsafe(self._set(False), self._loop).result(60)
        return time.monotonic()

    def restore(self) -> None:
        """Forward again."""
        asyncio.run_coroutine_threadsafe(self._set(True), self._loop).result(60)

    def stop(self) -> None:
        """Break all connections and stop listening."""
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    async def _set(self, forwards: bool) -> None:
        self._forwards.set() if forwards else self._forwards.clear()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._end(server))
        self._loop.close()

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        for _ in range(3):
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened_at.append(time.monotonic())
        beyond: asyncio.StreamWriter | None = None
        try:
            await self._forwards.wait()
            parts = urlsplit(self.target)
            answers, beyond = await asyncio.open_connection(parts.hostname, parts.port)
            pumps = {
                asyncio.ensure_future(self._pump(reader, beyond)),
                asyncio.ensure_future(self._pump(answers, writer)),
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the proxy stops, or one side is gone: the other's connection breaks too
        finally:
            for end in (writer, beyond):
                if end is not None:
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._forwards.wait()
                writer.write(data)
                await writer.drain()
            await self._forwards.wait()


@contextmanager
def black_hole(target: str) -> Iterator[BlackHole]:
    """A proxy before `target` for the length of the block."""
    proxy = BlackHole(target)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
