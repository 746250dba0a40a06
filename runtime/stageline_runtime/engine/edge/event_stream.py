"""The streamed answer of `POST /v1/generate`: core events in, newline-delimited JSON out.

The core hands each token over in its own turn of the event loop; the token becomes text at once (one token's worth of
work, so no stream holds up another) and waits to be written, merged with what waits already. So however far a client
lags, a stream holds at most its own output once, and a lagging client gets several tokens in one line.

Two tasks: one writes lines as fast as the client reads, one waits for the client to leave. Whatever ends first, the
core is told to abort unless the request has ended by itself. The stream has exactly one `Admitted`, first, and exactly
one `Finished` or `Failed`, last; a blank line says that the request is queued and the group at work.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from stageline_api.engine_http import Admitted, Delta, Failed, Finished, FinishReason, TokenLogprob
from stageline_runtime.engine.core_api import (
    AdmittedRequest,
    CoreEvent,
    EndEvent,
    EngineCoreApi,
    FailEvent,
    PromptEvent,
    TokenEvent,
)
from stageline_runtime.engine.text.output_text import OutputStart, Piece
from stageline_runtime.engine.text.told_prompt import PromptPiece, ToldPrompt

logger = logging.getLogger(__name__)
MEDIA_TYPE = "application/x-ndjson"
MOST_LOGPROBS = 512
"""Of one line: with twenty alternatives each they are a megabyte or two, and who reads lines takes eight at most."""
QUEUED_WORD_SECONDS = 5.0
"""How often a request that waits for a slot is said to, as long as the group begins steps: well within what a gateway
allows a working engine to be silent."""


class EventStream(Response):
    """An ASGI response that owns an admitted request until its end; `on_close` is called once, at that end."""

    def __init__(
        self, core: EngineCoreApi, start: OutputStart, request: AdmittedRequest, on_close: Callable[[], None]
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        # The body is streamed; the base class has counted an empty one.
        del self.headers["content-length"]
        self._core = core
        self._request = request
        self._output = start.output
        self._prompt = start.prompt
        self._unwritten = _Unwritten()
        if self._prompt is not None:
            self._unwritten.add_prompt(self._prompt.begun())
        self._unwritten.add(Piece(start.text, (), stopped=False))
        self._cached_tokens = 0
        self._ended = False
        """The request has ended, here or at the core: nothing more is taken, and there is nothing to abort."""
        self._on_close = on_close

    def take(self, event: CoreEvent) -> None:
        """The request's sink. A bug on the way to text ends this stream, not the core's turn with all the others."""
        if self._ended:
            return
        try:
            self._take(event)
        except Exception:
            about = {"request_id": self._request.request_id}
            logger.exception("the core's event could not be answered", extra=about)
            self._abort()
            self._fail("The engine failed while it generated this answer; its log says why.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Stream until the request ends or the client leaves."""
        write = asyncio.create_task(self._write(send))
        leave = asyncio.create_task(_wait_for_disconnect(receive))
        self._say_if_queued_later(self._core.steps_while_queued(self._request.request_id))
        try:
            await asyncio.wait((write, leave), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._abort()
            self._timer.cancel()
            write.cancel()
            leave.cancel()
            written, _ = await asyncio.gather(write, leave, return_exceptions=True)
            self._on_close()
        # A client that leaves breaks the write; anything else that does is ours to see in the log.
        if isinstance(written, Exception) and not isinstance(written, OSError):
            raise written

    def _take(self, event: CoreEvent) -> None:
        match event:
            case PromptEvent(report=report):
                assert self._prompt is not None, "log probabilities of a prompt that isn't told"
                self._unwritten.add_prompt(self._prompt.reported(report))
            case TokenEvent() if self._request.is_prompt_only:
                self._cached_tokens = event.cached_prompt_tokens
            case EndEvent() if self._request.is_prompt_only:
                self._ended = True
                self._finish(FinishReason.LENGTH)
            case TokenEvent(token_ids=token_ids, logprobs=logprobs):
                self._cached_tokens = event.cached_prompt_tokens
                piece = self._output.push(token_ids, logprobs)
                self._unwritten.add(piece)
                if piece.stopped:
                    self._abort(FinishReason.STOP)
                    self._finish(FinishReason.STOP)
            case EndEvent(reason=reason):
                self._ended = True
                piece = self._output.finish()
                self._unwritten.add(piece)
                self._finish(FinishReason.STOP if piece.stopped else reason)
            case FailEvent(message=message, is_final=is_final):
                self._ended = True
                self._fail(message, is_final, event.is_suspect)

    def _abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        if not self._ended:
            self._ended = True
            self._core.abort(self._request.request_id, reason)

    def _finish(self, reason: FinishReason) -> None:
        self._unwritten.end(
            Finished(
                reason=reason,
                prompt_tokens=len(self._request.prompt_token_ids),
                completion_tokens=self._output.completion_tokens,
                cached_tokens=self._cached_tokens,
                stop_string=self._output.stop_string,
            )
        )

    def _fail(self, message: str, is_final: bool = False, is_suspect: bool = False) -> None:
        self._unwritten.end(Failed(message=message, is_final=is_final, is_suspect=is_suspect))

    def _say_if_queued_later(self, steps_said: int | None) -> None:
        """Write a blank line now and then, but none when the group began no step since: a hang is still to be seen."""

        def say() -> None:
            steps = self._core.steps_while_queued(self._request.request_id)
            if steps not in (None, steps_said):
                self._unwritten.wake()
            self._say_if_queued_later(steps)

        # A timer of the loop, where a task of its own would wait all through every request.
        self._timer = asyncio.get_running_loop().call_later(QUEUED_WORD_SECONDS, say)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        request = self._request
        admitted = Admitted(
            prompt_tokens=len(request.prompt_token_ids),
            tool_call_format=request.tool_call_format,
            thoughts=request.thoughts,
            ignored=request.ignored,
        )
        await _send_lines(send, [admitted])
        while True:
            await self._unwritten.filled()
            tells_prompt = self._prompt is not None and await self._write_prompt(self._prompt, send)
            events = self._unwritten.take()
            if events or not tells_prompt:
                await _send_lines(send, events)
            if events and isinstance(events[-1], Finished | Failed):
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_prompt(self, prompt: ToldPrompt, send: Send) -> bool:
        """Write what waits of the prompt; returns whether anything did."""
        some = False
        while (piece := self._unwritten.next_prompt_piece()) is not None:
            some = True
            await _send_lines(send, [prompt.written(piece)])
            await asyncio.sleep(0)  # between two pieces others have their turn, whether or not the socket is full
        return some


class _Unwritten:
    """What waits to be written: pieces of the prompt, one merged delta, and the end of the stream."""

    def __init__(self) -> None:
        self._prompt: deque[PromptPiece] = deque()
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: Finished | Failed | None = None
        self._filled = asyncio.Event()

    def add(self, piece: Piece) -> None:
        assert self._end is None, f"output after the end of a stream: {piece}"
        if piece.text or piece.token_ids:
            self._texts.append(piece.text)
            self._token_ids += piece.token_ids
            self._logprobs += piece.logprobs
            self._filled.set()

    def add_prompt(self, pieces: Iterable[PromptPiece]) -> None:
        self._prompt.extend(pieces)
        if self._prompt:
            self._filled.set()

    def end(self, event: Finished | Failed) -> None:
        assert self._end is None, f"a second end of a stream: {event!r} after {self._end!r}"
        self._end = event
        self._filled.set()

    def wake(self) -> None:
        """Let the writer go on, with nothing if nothing has come."""
        self._filled.set()

    async def filled(self) -> None:
        """Wait for something."""
        await self._filled.wait()
        self._filled.clear()

    def next_prompt_piece(self) -> PromptPiece | None:
        """The first piece of the prompt that waits; they stand before what `take` gives."""
        return self._prompt.popleft() if self._prompt else None

    def take(self) -> list[Delta | Finished | Failed]:
        """All of the rest: one delta if there is any output, of several where it has many log probabilities, then the
        end when it has come. The text comes with the last of them."""
        events: list[Delta | Finished | Failed] = []
        if self._texts:
            token_ids, logprobs = self._token_ids, self._logprobs
            # Tokens have log probabilities in their order, all but what ended the output.
            cuts = range(0, max(1, len(logprobs)), MOST_LOGPROBS)
            for start in cuts[:-1]:
                end = start + MOST_LOGPROBS
                events.append(
                    Delta(text="", token_ids=tuple(token_ids[start:end]), logprobs=tuple(logprobs[start:end]))
                )
            last, text = cuts[-1], "".join(self._texts)
            events.append(Delta(text=text, token_ids=tuple(token_ids[last:]), logprobs=tuple(logprobs[last:])))
            self._texts, self._token_ids, self._logprobs = [], [], []
        if self._end is not None:
            events.append(self._end)
        return events


async def _send_lines(send: Send, events: Sequence[BaseModel]) -> None:
    lines = "".join(event.model_dump_json() + "\n" for event in events) or "\n"
    # Waits while the client's socket is full; what comes meanwhile is merged.
    await send({"type": "http.response.body", "body": lines.encode(), "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
