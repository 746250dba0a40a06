"""The answer to an admitted request as lines of JSON, for every transport: core events in, one line at a time out.

The core delivers each token in its own turn of the event loop. The token becomes text at once (one token's work, so
no answer delays another) and is merged with the text that waits to be written. So however slow the client is, an
answer holds at most its own output once, log probabilities packed. A slow client gets several tokens in one line,
up to `MOST_DELTA_BYTES` of them. Text is sent with its token ids or after them, never before: a client that stops
reading between any two lines has the ids of all its text. A line is built only when it is taken.

An answer has exactly one `Admitted`, first, and exactly one `Finished` or `Failed`, last; a blank line means that
the request is queued and the group at work. The writer calls `close` at the end, for any cause: then the core is
asked to abort unless the request has ended.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from stageline_api.engine_http import Admitted, Failed, Finished, FinishReason
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
from stageline_runtime.engine.text.told_prompt import PromptPiece

logger = logging.getLogger(__name__)
MEDIA_TYPE = "application/x-ndjson"
MOST_LOGPROBS = 512
"""Per line: with twenty alternatives each they are one or two megabytes, and clients accept lines of eight at most."""
MOST_DELTA_BYTES = 64 * 1024
"""Per line of text and token ids, without its frame: such a line takes a millisecond or two to build."""
MOST_WRITE_BYTES = 256 * 1024
"""Waiting lines are joined into one write up to this size; only a single longer line exceeds it."""
MOST_BEFORE_A_LINE = MOST_WRITE_BYTES - MOST_DELTA_BYTES - 1024
"""A write with more than this may have no capacity for another line."""
LARGE_LINE_BYTES = 16 * 1024
"""Such a line takes a millisecond or more to build: it ends its write, so that other streams run before the next."""
_CHARACTER_BYTES = 6
"""At most, in JSON: that of a control character."""
_TOKEN_ID_BYTES = 11
"""At most, with its comma: below 2**32."""
QUEUED_WORD_SECONDS = 5.0
"""Interval of keepalives to a request that waits for a slot while the group runs steps: well below the gateway's
limit for a silent engine."""


class AnswerLines:
    """Owns an admitted request until `close`.

    After the start, the core's turn calls `wake` when output begins to wait; `on_close` is called once, at the end.
    """

    def __init__(
        self,
        core: EngineCoreApi,
        start: OutputStart,
        request: AdmittedRequest,
        *,
        wake: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        self._core = core
        self._request = request
        self._output = start.output
        self._prompt = start.prompt
        self._wake = wake
        self._on_close = on_close
        self._unwritten = _Unwritten(start)
        if self._prompt is not None:
            self._unwritten.add_prompt(self._prompt.begun())
        self._unwritten.add(Piece(start.text, (), stopped=False))
        self._cached_tokens = 0
        self._ended = False
        """The request has ended, here or at the core: further events are ignored, and there is no request to abort."""
        self._admitted_told = False
        self._word_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.is_over = False
        """Its last line has been taken."""

    @property
    def has_waiting(self) -> bool:
        """Whether there is a line to take."""
        return not self.is_over and (not self._admitted_told or self._word_due or self._unwritten.has_any)

    def submitted(self) -> None:
        """The core has the request: look now and then whether it still waits there."""
        self._say_if_queued_later(self._core.steps_while_queued(self._request.request_id))

    def take(self, event: CoreEvent) -> None:
        """The request's sink. A bug on the way to text ends this answer, not the core's turn with all the others."""
        if self._ended:
            return
        try:
            self._take(event)
        except Exception:
            about = {"request_id": self._request.request_id}
            logger.exception("the core's event could not be answered", extra=about)
            self._abort()
            self._fail(FailEvent("The engine failed while it generated this answer; its log says why."))
        if self._unwritten.has_any:
            self._wake()

    def next_line(self) -> bytes:
        """The next line, without its newline; blank as a keepalive of a request that still waits."""
        self._word_due = False
        if not self._admitted_told:
            self._admitted_told = True
            return self._admitted().to_json()
        if self._prompt is not None and (piece := self._unwritten.next_prompt_piece()) is not None:
            return self._prompt.written(piece).to_json()
        if (delta := self._unwritten.next_delta()) is not None:
            return delta
        if (end := self._unwritten.end) is None:
            return b""
        self.is_over = True
        return end.to_json()

    def close(self) -> None:
        """End the answer, for its writer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._abort()
        if self._timer is not None:
            self._timer.cancel()
        self._on_close()

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
            case FailEvent():
                self._ended = True
                self._fail(event)

    def _abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        if not self._ended:
            self._ended = True
            self._core.abort(self._request.request_id, reason)

    def _admitted(self) -> Admitted:
        request = self._request
        return Admitted(
            prompt_tokens=len(request.prompt_token_ids),
            tool_call_format=request.tool_call_format,
            thoughts=request.thoughts,
            ignored=request.ignored,
        )

    def _finish(self, reason: FinishReason) -> None:
        self._unwritten.finish(
            Finished(
                reason=reason,
                prompt_tokens=len(self._request.prompt_token_ids),
                completion_tokens=self._output.completion_tokens,
                cached_tokens=self._cached_tokens,
                stop_string=self._output.stop_string,
            )
        )

    def _fail(self, event: FailEvent) -> None:
        self._unwritten.finish(
            Failed(
                message=event.message,
                is_final=event.is_final,
                is_suspect=event.is_suspect,
                was_waiting=event.was_waiting,
            )
        )

    def _say_if_queued_later(self, steps_said: int | None) -> None:
        """Have a blank line written now and then, but none when the group began no step since: a hang is still seen."""

        def say() -> None:
            steps = self._core.steps_while_queued(self._request.request_id)
            if steps not in (None, steps_said):
                self._word_due = True
                self._wake()
            self._say_if_queued_later(steps)

        # A timer of the loop, where a task of its own would wait all through every request.
        self._timer = asyncio.get_running_loop().call_later(QUEUED_WORD_SECONDS, say)


class _Unwritten:
    """What waits to be written: pieces of the prompt, merged deltas of a line each, and the end of the answer."""

    def __init__(self, start: OutputStart) -> None:
        self._prompt: deque[PromptPiece] = deque()
        self._deltas: deque[_MergedDelta] = deque()
        """Of all but the last there is no more to come."""
        self._logprobs = start.logprobs
        self.end: Finished | Failed | None = None
        """Never reset: once a caller has taken it, no line follows."""

    @property
    def has_any(self) -> bool:
        return bool(self._deltas) or self.end is not None or bool(self._prompt)

    def add(self, piece: Piece) -> None:
        assert self.end is None, f"output after the end of an answer: {piece}"
        if piece.logprobs:
            assert self._logprobs is not None, "log probabilities that nobody asked for"
            self._logprobs.add(piece.logprobs)
        if _most_bytes(piece.text, piece.token_ids) <= MOST_DELTA_BYTES:
            self._merge(piece.text, piece.token_ids)
        else:
            for text, token_ids in _parts(piece):
                self._merge(text, token_ids)

    def add_prompt(self, pieces: Iterable[PromptPiece]) -> None:
        self._prompt.extend(pieces)

    def finish(self, event: Finished | Failed) -> None:
        assert self.end is None, f"a second end of an answer: {event!r} after {self.end!r}"
        self.end = event

    def next_prompt_piece(self) -> PromptPiece | None:
        """The first waiting piece of the prompt; prompt pieces precede all output."""
        return self._prompt.popleft() if self._prompt else None

    def next_delta(self) -> bytes | None:
        """Waiting output for one line: with many log probabilities only the first of them, and the text last."""
        if not self._deltas:
            return None
        delta, logprobs = self._deltas[0], self._logprobs
        num_described = 0
        if logprobs:
            # Tokens have log probabilities in their order, all but what ended the output.
            num_described = len(logprobs) if len(self._deltas) == 1 else min(len(delta.token_ids), len(logprobs))
            if num_described > MOST_LOGPROBS:
                token_ids = delta.token_ids[:MOST_LOGPROBS]
                del delta.token_ids[:MOST_LOGPROBS]
                return delta_json("", token_ids, logprobs.take_described(MOST_LOGPROBS))
        self._deltas.popleft()
        described = logprobs.take_described(num_described) if logprobs else []
        return delta_json("".join(delta.texts), delta.token_ids, described)

    def _merge(self, text: str, token_ids: Sequence[int]) -> None:
        if not text and not token_ids:
            return
        num_bytes = _most_bytes(text, token_ids)
        if not self._deltas or self._deltas[-1].num_bytes + num_bytes > MOST_DELTA_BYTES:
            self._deltas.append(_MergedDelta())
        self._deltas[-1].add(text, token_ids, num_bytes)


class _MergedDelta:
    """Pieces of output that go out in one line."""

    __slots__ = ("num_bytes", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.num_bytes = 0
        """Upper bound of their size when written."""

    def add(self, text: str, token_ids: Sequence[int], num_bytes: int) -> None:
        self.texts.append(text)
        self.token_ids += token_ids
        self.num_bytes += num_bytes


def _most_bytes(text: str, token_ids: Sequence[int]) -> int:
    """Upper bound of their size in a line; the exact size is known only after encoding."""
    return _CHARACTER_BYTES * len(text) + _TOKEN_ID_BYTES * len(token_ids)


def _parts(piece: Piece) -> Iterator[tuple[str, Sequence[int]]]:
    """A piece too large for a line, in parts that aren't; all its ids first, since text may follow its ids."""
    most_ids, most_characters = MOST_DELTA_BYTES // _TOKEN_ID_BYTES, MOST_DELTA_BYTES // _CHARACTER_BYTES
    for start in range(0, len(piece.token_ids), most_ids):
        yield "", piece.token_ids[start : start + most_ids]
    for start in range(0, len(piece.text), most_characters):
        yield piece.text[start : start + most_characters], ()


def delta_json(text: str, token_ids: Sequence[int], logprobs: Sequence[Mapping[str, object]] = ()) -> bytes:
    """The same JSON as `Delta` writes. Infinite values are null."""
    delta: dict[str, object] = {"type": "delta", "text": text, "token_ids": token_ids}
    return msgspec.json.encode(delta | {"logprobs": logprobs} if logprobs else delta)
