"""`POST /v1/multiplexed`: many generations of one client over one connection with two open bodies.

The client's body is chunked; each message is one line: a `Word`, a space and the stream's number. `open` adds a space
and the `GenerateRequest` as JSON; an error in that JSON affects only its stream. The client opens, holds, resumes and
closes streams. The engine's body is chunked too; each event of a stream is one line: the stream's number, a space, and
the event as JSON (`engine_http.Event`). Events of several streams that are due at once share one write. A line with
only a number is that stream's blank line, which reports that it still waits; an empty line has no meaning.

The client chooses the numbers; they increase and never repeat on a connection. A stream ends with its `Finished`,
`Failed` or `Refused`, or when the client closes it, which aborts it. The end of the connection aborts all streams.
While a stream is held the engine merges its events and writes none of them, so that a slow reader never blocks other
streams. A client's line with an unknown word or number, or a line that is too long, ends the connection. A client that
ends its body opens no more streams. The engine ends its own body then, or when it shuts down, once all streams have
ended.

Lines over HTTP rather than WebSocket or HTTP/2: both ends already have an HTTP/1.1 parser in C with limits, keys and
TLS; see docs/dev/adr/0043. A client that sends long requests, or asks for megabytes of log probabilities, should use a
second connection for those, so that they delay no others.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MULTIPLEXED_PATH: Final = "/v1/multiplexed"
QUICK_LINE_BYTES: Final = 64 * 1024
"""A request up to this size is parsed in a millisecond."""
MOST_LINE_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of a request on a client's line."""
LINE_LIMIT_BYTES: Final = MOST_LINE_BYTES + 1024
"""Maximum line length, with a request of `MOST_LINE_BYTES`."""
_MOST_DIGITS: Final = 15


class Word(StrEnum):
    """The message of a client's line."""

    OPEN = "open"
    """Generate this request as the stream with that number."""
    CLOSE = "close"
    """Abort the stream. Ignored if the stream has already ended."""
    HOLD = "hold"
    """Buffer its events until `GO_ON`."""
    GO_ON = "go_on"
    """Write its events again."""


@dataclass(frozen=True, slots=True)
class ClientLine:
    word: Word
    stream: int
    request: bytes = b""
    """After `open`: JSON, not parsed yet."""

    def written(self) -> bytes:
        """The line, including its newline."""
        rest = b" " + self.request if self.word is Word.OPEN else b""
        return b"%b %d%b\n" % (self.word.encode(), self.stream, rest)


class UnreadableLineError(ValueError):
    """The line names no stream. The message shows none of the line's content."""


def client_line(line: bytes) -> ClientLine:
    """Parse a client's line without its newline; raises UnreadableLineError."""
    word, _, rest = line.partition(b" ")
    number, blank, request = rest.partition(b" ")
    try:
        known = Word(word.decode("ascii"))
    except ValueError:
        raise UnreadableLineError(f"a line of {len(line)} bytes begins with no known word") from None
    if (known is Word.OPEN) != bool(blank):
        raise UnreadableLineError(f"a line of {len(line)} bytes has too much or too little after '{known}'")
    return ClientLine(known, stream_number(number), request)


def stream_number(written: bytes) -> int:
    """Parse a stream's number: decimal digits without leading zeros.

    Raises UnreadableLineError.
    """
    if not written.isdigit() or len(written) > _MOST_DIGITS or (written[:1] == b"0" and written != b"0"):
        raise UnreadableLineError("a line has no stream number where one is expected")
    return int(written)


class BrokenConnectionError(Exception):
    """The client violates the protocol: the engine stops reading. The message shows none of the client's content."""


class LineCutter:
    """Splits received bytes into lines; buffers only the start of one."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def cut(self, chunk: bytes) -> Iterable[bytes]:
        """The complete lines, without blank ones.

        Raises:
            BrokenConnectionError: a line is longer than `LINE_LIMIT_BYTES`.
        """
        self._rest += chunk
        if b"\n" not in chunk:
            _check_length(self._rest)
            return ()
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in (*lines, rest):
            _check_length(line)
        return [line for line in lines if line]

    def end(self) -> None:
        """Check that the client's body ended at the end of a line.

        Raises:
            BrokenConnectionError: it stopped within a line.
        """
        if self._rest:
            raise BrokenConnectionError("its last line has no end")


def _check_length(line: bytes | bytearray) -> None:
    if len(line) > LINE_LIMIT_BYTES:
        raise BrokenConnectionError(f"a line is longer than {LINE_LIMIT_BYTES} bytes")
