"""The streamed answer of `POST /v1/generate`: the lines of one request, written as fast as its client reads.

Two tasks: one writes what waits, one waits for the client to leave. Whatever ends first, the answer is closed, which
aborts its request unless that has ended by itself. A request that takes long to read, or whose guide does, has its
answer begun with blank lines, so that its client knows the engine is there.
"""

import asyncio
import logging
from collections.abc import Callable

from fastapi import Response
from starlette.types import Receive, Scope, Send

from stageline_api.engine_http import Failed
from stageline_api.multiplexing import Refused
from stageline_runtime.engine.edge.answer_lines import (
    LARGE_LINE_CHARACTERS,
    MEDIA_TYPE,
    MOST_BEFORE_A_LINE,
    QUEUED_WORD_SECONDS,
    AnswerLines,
)
from stageline_runtime.engine.edge.generation import ReadRequest
from stageline_runtime.engine.errors import EngineRefusal

logger = logging.getLogger(__name__)


class EventStream(Response):
    """An ASGI response that owns an answer until its end; `filled` is set whenever the answer has something new."""

    def __init__(self, answer: AnswerLines | None, filled: asyncio.Event) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        # The body is streamed; the base class has counted an empty one.
        del self.headers["content-length"]
        self._answer = answer
        self._filled = filled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Stream until the request ends or the client leaves."""
        write = asyncio.create_task(self._write(send))
        leave = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((write, leave), return_when=asyncio.FIRST_COMPLETED)
        finally:
            write.cancel()
            leave.cancel()
            written, _ = await asyncio.gather(write, leave, return_exceptions=True)
            if self._answer is not None:
                self._answer.close()
        # A client that leaves breaks the write; anything else that does is ours to see in the log.
        if isinstance(written, Exception) and not isinstance(written, OSError):
            raise written

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._answer is not None:
            await self._write_lines(send, self._answer)

    async def _write_lines(self, send: Send, answer: AnswerLines) -> None:
        while not answer.is_over:
            if not answer.has_waiting:
                self._filled.clear()
                await self._filled.wait()
            body = _waiting_lines(answer).encode()
            if answer.is_over:
                answer.close()  # Whoever reads the end may use the id again.
            # Waits while the client's socket is full; what comes meanwhile is merged.
            await send({"type": "http.response.body", "body": body, "more_body": not answer.is_over})
            if answer.has_waiting:
                await asyncio.sleep(0)  # others have their turn, whether or not the socket is full


class LateEventStream(EventStream):
    """One that begins before its request was read. `start` hands that to the core, as `Generation.start` does."""

    def __init__(
        self, reading: asyncio.Task[ReadRequest], start: Callable[[ReadRequest], AnswerLines], filled: asyncio.Event
    ) -> None:
        super().__init__(None, filled)
        self._reading = reading
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the request ends, or is refused, or the client leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reading.cancel()

    async def _write(self, send: Send) -> None:
        await super()._write(send)
        while True:
            await send({"type": "http.response.body", "body": b"\n", "more_body": True})
            if (await asyncio.wait([self._reading], timeout=QUEUED_WORD_SECONDS))[0]:
                break
        if (word := self._begun()) is not None:
            await send({"type": "http.response.body", "body": f"{word.model_dump_json()}\n".encode()})
        elif self._answer is not None:
            await self._write_lines(send, self._answer)

    def _begun(self) -> Refused | Failed | None:
        """Begin the answer; returns what there is in its place, if it can't begin."""
        try:
            self._answer = self._start(self._reading.result())
        except EngineRefusal as refusal:
            return Refused(error=refusal.body())
        except (Exception, asyncio.CancelledError):
            logger.exception("a request could not be read")
            return Failed(message="The engine failed on this request; its log says why.")
        return None


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _waiting_lines(answer: AnswerLines) -> str:
    lines: list[str] = []
    num_characters = 0
    while answer.has_waiting:
        line = answer.next_line()
        lines.append(line)
        num_characters += len(line)
        if len(line) > LARGE_LINE_CHARACTERS or num_characters > MOST_BEFORE_A_LINE:
            break
    return "\n".join(lines) + "\n"
