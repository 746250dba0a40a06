"""`POST /v1/multiplexed` as an ASGI response: the client's lines are read while the streams' lines are written.

One task reads, one starts the opened streams, one writes. Reading has priority, so that a request is closed before
it costs anything if its client has left. The writer takes the waiting lines of all streams and sends them at once;
while it waits for a slow client, new output is merged in each stream. The body ends when no stream is left and the
engine shuts down, or when the client has ended its own body or violated the protocol. A client that leaves or
violates the protocol aborts all of its streams.
"""

import asyncio
import logging
import time
from typing import Final

from fastapi import Response
from starlette.types import Receive, Scope, Send

from stageline_api.multiplexing import BrokenConnectionError, LineCutter, UnreadableLineError, client_line
from stageline_runtime.engine.edge.answer_lines import MEDIA_TYPE
from stageline_runtime.engine.edge.connection_streams import ConnectionStreams
from stageline_runtime.engine.edge.generation import Generation

logger = logging.getLogger(__name__)
TURN_SECONDS: Final = 0.002
"""For so long the lines of a burst are obeyed in one turn of the event loop, so that their requests start together."""
MAX_UNREAD_BYTES: Final = 4 * 1024 * 1024
"""Limit for opened, unparsed requests of a connection; above it, reading pauses."""


class MultiplexedConnections:
    """All that are open, so that the engine can let them end. None outlives its engine for being idle."""

    def __init__(self) -> None:
        self._open: set[MultiplexedAnswers] = set()
        self._leaving = False

    def leave(self) -> None:
        """Let each end as soon as it has no stream."""
        self._leaving = True
        for each in self._open:
            each.end_when_idle()

    def opened(self, answers: "MultiplexedAnswers") -> None:
        self._open.add(answers)
        if self._leaving:
            answers.end_when_idle()

    def closed(self, answers: "MultiplexedAnswers") -> None:
        self._open.discard(answers)


class MultiplexedAnswers(Response):
    def __init__(self, generation: Generation, connections: MultiplexedConnections) -> None:
        super().__init__(media_type=MEDIA_TYPE, headers={"Connection": "close"})
        # The body is streamed; the base class has counted an empty one.
        del self.headers["content-length"]
        self._connections = connections
        self._filled = asyncio.Event()
        self._opened = asyncio.Event()
        """Set when an opened stream waits for its start."""
        self._begun = asyncio.Event()
        self._streams = ConnectionStreams(generation, self._filled.set, self._begun.set)
        self._ends_when_idle = False

    def end_when_idle(self) -> None:
        self._ends_when_idle = True
        self._filled.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry streams until the client leaves, or the body ends."""
        self._connections.opened(self)
        write = asyncio.create_task(self._write(send))
        read = asyncio.create_task(self._read(receive, scope.get("client")))
        begin = asyncio.create_task(self._begin_all())
        try:
            await asyncio.wait((write, read, begin), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.close_all()
            self._connections.closed(self)
            write.cancel()
            read.cancel()
            begin.cancel()
            ends = await asyncio.gather(write, read, begin, return_exceptions=True)
        # A client that leaves breaks the write; anything else that does is ours to see in the log.
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, OSError):
                raise end

    async def _write(self, send: Send) -> None:
        # At once, so that the client knows that it was admitted.
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        streams = self._streams
        while streams or not self._ends_when_idle:
            self._filled.clear()
            if lines := streams.next_lines():
                # Waits while the client's socket is full; new output is merged until it isn't.
                await send({"type": "http.response.body", "body": lines, "more_body": True})
            if streams.has_waiting:
                await asyncio.sleep(0)  # lets other tasks run, whether or not the socket is full
            elif streams or not self._ends_when_idle:
                await self._filled.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self, receive: Receive, client: tuple[str, int] | None) -> None:
        """Returns when the client has left."""
        try:
            await self._obey_all(receive)
        except (BrokenConnectionError, UnreadableLineError) as broken:
            logger.warning("the connection of %s ends with %d streams: %s", client, len(self._streams), broken)
            self._streams.close_all()
        self.end_when_idle()
        while (await receive())["type"] != "http.disconnect":
            pass  # Further data is discarded.

    async def _obey_all(self, receive: Receive) -> None:
        """Returns when the client has ended its body, or has left.

        Raises:
            BrokenConnectionError: a line violates the protocol.
            UnreadableLineError: a line can't be parsed.
        """
        cutter = LineCutter()
        while (message := await receive())["type"] == "http.request":
            began = time.perf_counter()
            for line in cutter.cut(message["body"]):
                self._streams.obey(client_line(line))
                if time.perf_counter() - began > TURN_SECONDS:
                    await asyncio.sleep(0)
                    began = time.perf_counter()
            await self._begin_or_leave()
            if self._ends_when_idle:
                self._filled.set()  # What was closed may have been the last.
            if not message["more_body"]:
                cutter.end()
                return
        self._streams.close_all()

    async def _begin_or_leave(self) -> None:
        """Start opened streams for a turn; `_begin_all` continues while more is read. Waits if too much is unread."""
        if not self._opened.is_set() and self._begin_for_a_turn():
            self._opened.set()
        while self._streams.unread_bytes > MAX_UNREAD_BYTES:
            self._begun.clear()
            await self._begun.wait()

    async def _begin_all(self) -> None:
        while True:
            await self._opened.wait()
            if not self._begin_for_a_turn():
                self._opened.clear()
            self._begun.set()
            await asyncio.sleep(0)

    def _begin_for_a_turn(self) -> bool:
        """Whether some may be left."""
        began = time.perf_counter()
        while self._streams.begin_next():
            if time.perf_counter() - began > TURN_SECONDS:
                return True
        return False
