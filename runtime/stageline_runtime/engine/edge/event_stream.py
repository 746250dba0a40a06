"""The streamed answer of `POST /v1/generate`: core events in, newline-delimited JSON out.

Four tasks: one takes tokens from the core as fast as it makes them, one writes lines as fast as the client reads, one
waits for the client to leave, one sees to it that a long wait for a slot isn't taken for the engine's end. Whatever
ends first, the core is told to abort unless the request has ended by itself. The stream has exactly one `Admitted`,
first, and exactly one `Finished` or `Failed`, last; a blank line says that the request is queued and the group at work.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from fastapi import Response
from starlette.types import Receive, Scope, Send

from stageline_api.engine_http import Admitted, Delta, Failed, Finished, FinishReason
from stageline_runtime.engine.core_api import (
    AdmittedRequest,
    CoreEvent,
    EndEvent,
    EngineCorePort,
    FailEvent,
    TokenEvent,
)
from stageline_runtime.engine.edge.mailbox import EventMailbox
from stageline_runtime.engine.text.resume import OutputStart

logger = logging.getLogger(__name__)
MEDIA_TYPE = "application/x-ndjson"
QUEUED_WORD_SECONDS = 5.0
"""How often a request that waits for a slot is said to, as long as the group begins steps: well within what a gateway
allows a working engine to be silent."""


class EventStream(Response):
    """An ASGI response that owns an admitted request until its end; `on_close` is called once, at that end."""

    def __init__(
        self,
        core: EngineCorePort,
        start: OutputStart,
        request: AdmittedRequest,
        events: AsyncIterator[CoreEvent],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        # The body is streamed; the base class has counted an empty one.
        del self.headers["content-length"]
        self._core = core
        self._request = request
        self._events = events
        self._output = start.output
        self._mailbox = EventMailbox()
        self._mailbox.add(start.text, ())
        self._cached_tokens = 0
        self._ended = False
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Stream until the request ends or the client leaves."""
        pump = asyncio.create_task(self._pump())
        write = asyncio.create_task(self._write(send))
        leave = asyncio.create_task(_wait_for_disconnect(receive))
        say = asyncio.create_task(self._say_it_is_queued())
        tasks = (pump, write, leave, say)
        try:
            await asyncio.wait((write, leave), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._abort()
            for task in tasks:
                task.cancel()
            _, written, *_ = await asyncio.gather(*tasks, return_exceptions=True)
            self._on_close()
        # A client that leaves breaks the write; anything else that does is ours to see in the log.
        if isinstance(written, Exception) and not isinstance(written, OSError):
            raise written

    async def _pump(self) -> None:
        try:
            async for event in self._events:
                if self._take(event):
                    return
            self._abort()
            self._fail("The engine's core ended this request without saying why.")
        except Exception:
            logger.exception("request %s: the core's event stream broke", self._request.request_id)
            self._abort()
            self._fail("The engine failed while it generated this answer; its log says why.")
        finally:
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()

    def _take(self, event: CoreEvent) -> bool:
        """Handle one event of the core; returns whether it ends the stream."""
        match event:
            case TokenEvent(token_ids=token_ids, logprobs=logprobs):
                self._cached_tokens = event.cached_prompt_tokens
                piece = self._output.push(token_ids, logprobs)
                self._mailbox.add(piece.text, piece.token_ids, piece.logprobs)
                if piece.stopped:
                    self._abort(FinishReason.STOP)
                    self._finish(FinishReason.STOP)
                return piece.stopped
            case EndEvent(reason=reason):
                self._ended = True
                piece = self._output.finish()
                self._mailbox.add(piece.text, ())
                self._finish(FinishReason.STOP if piece.stopped else reason)
            case FailEvent(message=message, is_final=is_final):
                self._fail(message, is_final)
        return True

    def _abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        if not self._ended:
            self._ended = True
            self._core.abort(self._request.request_id, reason)

    def _finish(self, reason: FinishReason) -> None:
        self._mailbox.end(
            Finished(
                reason=reason,
                prompt_tokens=len(self._request.prompt_token_ids),
                completion_tokens=self._output.completion_tokens,
                cached_tokens=self._cached_tokens,
            )
        )

    def _fail(self, message: str, is_final: bool = False) -> None:
        self._ended = True
        self._mailbox.end(Failed(message=message, is_final=is_final))

    async def _say_it_is_queued(self) -> None:
        """A word from time to time; none when the group began no step since the last, so that a hang is still seen."""
        said = self._core.steps_while_queued(self._request.request_id)
        while True:
            await asyncio.sleep(QUEUED_WORD_SECONDS)
            steps = self._core.steps_while_queued(self._request.request_id)
            if steps not in (None, said):
                self._mailbox.wake()
            said = steps

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        prompt_tokens, tool_call_format = len(self._request.prompt_token_ids), self._request.tool_call_format
        await _send_lines(send, [Admitted(prompt_tokens=prompt_tokens, tool_call_format=tool_call_format)])
        while True:
            events = await self._mailbox.take()
            await _send_lines(send, events)
            if events and isinstance(events[-1], Finished | Failed):
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_lines(send: Send, events: list[Admitted] | list[Delta | Finished | Failed]) -> None:
    lines = "".join(event.model_dump_json() + "\n" for event in events) or "\n"
    # Waits while the client's socket is full; meanwhile the mailbox merges.
    await send({"type": "http.response.body", "body": lines.encode(), "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
