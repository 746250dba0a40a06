"""The streams of one connection: parses what the client sends to each, and writes their lines round-robin.

A stream is open from its `open` until its last line was taken or it is closed, which aborts its request and cancels
the reading of its prompt. No line is taken from a held stream. All streams with lines share one queue; after each
line a stream moves to the queue's end, so none delays the others. A stream with a prompt that is still being read,
or a grammar that is being compiled, sends a keepalive now and then. A bug in one stream doesn't affect another.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, assert_never

from stageline_api.engine_http import ErrorCode, Failed, GenerateRequest, Refused
from stageline_api.multiplexing import QUICK_LINE_BYTES, BrokenConnectionError, ClientLine, Word
from stageline_runtime.engine.edge.answer_lines import (
    LARGE_LINE_BYTES,
    MOST_BEFORE_A_LINE,
    QUEUED_WORD_SECONDS,
    AnswerLines,
)
from stageline_runtime.engine.edge.generation import Generation, ReadRequest, parse_request
from stageline_runtime.engine.errors import EngineRefusal

logger = logging.getLogger(__name__)
MOST_STREAMS: Final = 8192
"""Open at once; more are refused."""
MOST_UNTOLD: Final = 2 * MOST_STREAMS
"""Streams, including refused ones, with lines that the client has not read yet."""


class _Stream:
    __slots__ = ("answer", "is_held", "last_word", "number", "reading", "request_id", "timer", "unread", "word_due")

    def __init__(self, number: int) -> None:
        self.number = number
        self.request_id: str | None = None
        """Once it is parsed."""
        self.unread = 0
        """Bytes of its request, until they are parsed."""
        self.is_held = False
        self.reading: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        """While it is read."""
        self.word_due = False
        """To say that it is still read."""
        self.answer: AnswerLines | None = None
        self.last_word: Refused | Failed | None = None
        """In place of an answer."""

    @property
    def has_waiting(self) -> bool:
        return self.last_word is not None or (self.word_due if self.answer is None else self.answer.has_waiting)

    def parsed(self, request: GenerateRequest) -> GenerateRequest:
        self.request_id = request.request_id
        return request

    def was_read(self) -> None:
        """Its request is parsed, or no longer wanted."""
        self.reading = None
        self.word_due = False
        if self.timer is not None:
            self.timer.cancel()


class ConnectionStreams:
    """`wake` is called when the first stream begins to wait, `on_parsed` when a long request has been parsed."""

    def __init__(self, generation: Generation, wake: Callable[[], None], on_parsed: Callable[[], None]) -> None:
        self._generation = generation
        self._wake = wake
        self._on_parsed = on_parsed
        self._streams: dict[int, _Stream] = {}
        self._waiting: OrderedDict[int, _Stream] = OrderedDict()
        self._unread: dict[int, bytes] = {}
        """Requests of open streams that are not started, by number, the oldest first."""
        self.unread_bytes = 0
        """Of those, and of those that are being parsed."""
        self._last_number = -1

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def obey(self, line: ClientLine) -> None:
        """Execute the client's line; `begin_next` starts the streams that it opens, unless the client closes them
        first.

        Raises:
            BrokenConnectionError: a stream number is reused, or the client doesn't read what the engine sends.
        """
        number = line.stream
        match line.word:
            case Word.OPEN:
                self._open(number, line.request)
            case Word.CLOSE:
                self.close(number)
            case Word.HOLD:
                if (stream := self._streams.get(number)) is not None:
                    stream.is_held = True
                    self._waiting.pop(number, None)
            case Word.GO_ON:
                if (stream := self._streams.get(number)) is not None:
                    stream.is_held = False
                    self._wait_if_any(stream)
            case word:
                assert_never(word)

    def close(self, number: int) -> None:
        """Close the stream, if it is open."""
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        self._waiting.pop(number, None)
        self._unread.pop(number, None)
        self._give_back(stream)
        if stream.reading is not None:
            stream.reading.cancel()
            stream.was_read()
        if stream.answer is not None:
            stream.answer.close()

    def close_all(self) -> None:
        for number in list(self._streams):
            self.close(number)

    def next_lines(self) -> bytes:
        """Waiting lines for one write: one line of each stream, round-robin, until none is left or the write is
        full."""
        lines: list[bytes] = []
        num_bytes = 0
        while self._waiting and num_bytes <= MOST_BEFORE_A_LINE:
            number, stream = self._waiting.popitem(last=False)
            line = self._line_of(stream)
            lines.append(line)
            num_bytes += len(line)
            if number in self._streams and stream.has_waiting:
                self._waiting[number] = stream
            if len(line) > LARGE_LINE_BYTES:
                break
        return b"".join(lines)

    def _line_of(self, stream: _Stream) -> bytes:
        number, answer, is_over = stream.number, stream.answer, True
        try:
            if stream.last_word is not None:
                line = stream.last_word.to_json()
            elif answer is not None:
                line = answer.next_line()
                is_over = answer.is_over
            else:
                assert stream.word_due, "a stream waits with nothing to say"
                line, is_over, stream.word_due = b"", False, False
            written = b"%d %b\n" % (number, line) if line else b"%d\n" % number
        except Exception:
            written = b"%d %b\n" % (number, _failed("an answer could not be written").to_json())
            is_over = True
        if is_over:
            self.close(number)
        return written

    def _open(self, number: int, request: bytes) -> None:
        if number <= self._last_number:
            raise BrokenConnectionError(f"stream {number} is opened after stream {self._last_number}")
        if len(self._streams) >= MOST_UNTOLD:
            raise BrokenConnectionError(f"{MOST_UNTOLD} streams wait for it to read")
        self._last_number = number
        stream = _Stream(number)
        is_full = len(self._streams) >= MOST_STREAMS
        self._streams[number] = stream
        if is_full:
            refusal = EngineRefusal(ErrorCode.QUEUE_FULL, f"{MOST_STREAMS} streams are open on this connection", 1.0)
            self._end_with(stream, Refused(error=refusal.body()))
        else:
            self._unread[number] = request
            stream.unread = len(request)
            self.unread_bytes += len(request)

    def begin_next(self) -> bool:
        """Begin the oldest request that was opened and not closed since; whether there was one."""
        if not self._unread:
            return False
        number = next(iter(self._unread))
        written = self._unread.pop(number)
        stream = self._streams[number]
        if len(written) > QUICK_LINE_BYTES:
            self._read_later(stream, written)
        else:
            self._give_back(stream)
            self._start_or_read_later(stream, written)
        return True

    def _start_or_read_later(self, stream: _Stream, written: bytes) -> None:
        with self._ending(stream, "a request could not be read"):
            request = stream.parsed(parse_request(written))
            read = self._generation.read_at_once(request)
            if read is None:
                self._read_later(stream, request)
            else:
                self._start(stream, request, read)

    def _read_later(self, stream: _Stream, asked: GenerateRequest | bytes) -> None:
        stream.reading = asyncio.create_task(self._read_and_start(stream, asked))
        self._say_if_read_later(stream)

    async def _parse_later(self, stream: _Stream, written: bytes) -> GenerateRequest:
        try:
            return await self._generation.parse(written)
        finally:
            self._give_back(stream)

    def _give_back(self, stream: _Stream) -> None:
        """Its request is parsed or no longer wanted; a task cancelled before it starts never reports that."""
        if stream.unread:
            self.unread_bytes -= stream.unread
            stream.unread = 0
            self._on_parsed()

    async def _read_and_start(self, stream: _Stream, asked: GenerateRequest | bytes) -> None:
        try:
            with self._ending(stream, "a request could not be read"):
                request = stream.parsed(await self._parse_later(stream, asked)) if isinstance(asked, bytes) else asked
                self._start(stream, request, await self._generation.read(request))
        except asyncio.CancelledError:
            if stream.reading is None or stream.reading.cancelling():
                raise
            # Not this task was cancelled but one that it waits for, as others may; its stream still needs an end.
            self._end_with(stream, _failed("what a request waits for was cancelled", stream.request_id))
        finally:
            stream.was_read()

    def _say_if_read_later(self, stream: _Stream) -> None:
        """Have a blank line written now and then until it was read."""

        def say() -> None:
            stream.word_due = True
            self._wait_if_any(stream)
            self._say_if_read_later(stream)

        stream.timer = asyncio.get_running_loop().call_later(QUEUED_WORD_SECONDS, say)

    @contextmanager
    def _ending(self, stream: _Stream, what: str) -> Iterator[None]:
        """An error that prevents the start of its request becomes the stream's last line; a bug is logged as `what`."""
        try:
            yield
        except EngineRefusal as refusal:
            self._end_with(stream, Refused(error=refusal.body()))
        except Exception:
            self._end_with(stream, _failed(what, stream.request_id))

    def _start(self, stream: _Stream, request: GenerateRequest, read: ReadRequest) -> None:
        stream.answer = self._generation.start(request, read, lambda: self._wait_if_any(stream))
        self._wait_if_any(stream)

    def _end_with(self, stream: _Stream, word: Refused | Failed) -> None:
        stream.last_word = word
        self._wait_if_any(stream)

    def _wait_if_any(self, stream: _Stream) -> None:
        """Queue the stream if it has lines, is not held, and is still open."""
        number = stream.number
        if number in self._waiting or stream.is_held or number not in self._streams or not stream.has_waiting:
            return
        if not self._waiting:
            self._wake()
        self._waiting[number] = stream


def _failed(what: str, request_id: str | None = None) -> Failed:
    """Called where an exception is handled, which goes to the log."""
    logger.exception(what, extra={} if request_id is None else {"request_id": request_id})
    return Failed(message="The engine failed on this request; its log says why.")
