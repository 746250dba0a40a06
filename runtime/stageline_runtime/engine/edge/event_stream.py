"""The streamed answer of `POST /v1/generate`: the lines of one request, written as fast as its client reads.

One task writes the waiting lines, another waits for the client to leave. When either ends, the answer is closed,
which aborts its request unless that has ended.
"""

import asyncio

from fastapi import Response
from starlette.types import Receive, Scope, Send

from stageline_runtime.engine.edge.answer_lines import (
    LARGE_LINE_BYTES,
    MEDIA_TYPE,
    MOST_BEFORE_A_LINE,
    AnswerLines,
)


class EventStream(Response):
    """An ASGI response that owns an answer until its end; `filled` is set whenever the answer has something new."""

    def __init__(self, answer: AnswerLines, filled: asyncio.Event) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        # The body is streamed; the base class has counted an empty one.
        del self.headers["content-length"]
        self._answer = answer
        self._filled = filled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Stream until the request ends or the client leaves."""
        write = asyncio.create_task(self._write(send))
        leave = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((write, leave), return_when=asyncio.FIRST_COMPLETED)
        finally:
            write.cancel()
            leave.cancel()
            written, _ = await asyncio.gather(write, leave, return_exceptions=True)
            self._answer.close()
        # A client that leaves breaks the write; anything else that does is ours to see in the log.
        if isinstance(written, Exception) and not isinstance(written, OSError):
            raise written

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        answer = self._answer
        while not answer.is_over:
            if not answer.has_waiting:
                self._filled.clear()
                await self._filled.wait()
            body = _waiting_lines(answer)
            if answer.is_over:
                answer.close()  # A client that has read the end may reuse the id.
            # Waits while the client's socket is full; new output is merged until it isn't.
            await send({"type": "http.response.body", "body": body, "more_body": not answer.is_over})
            if answer.has_waiting:
                await asyncio.sleep(0)  # others have their turn, whether or not the socket is full


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _waiting_lines(answer: AnswerLines) -> bytes:
    lines: list[bytes] = []
    num_bytes = 0
    while answer.has_waiting:
        line = answer.next_line()
        lines.append(line)
        num_bytes += len(line)
        if len(line) > LARGE_LINE_BYTES or num_bytes > MOST_BEFORE_A_LINE:
            break
    return b"\n".join(lines) + b"\n"
