"""`POST /v1/multiplexed`: many generations of one client over one connection, while both of its bodies are open.

The client's body is chunked and has a line for each thing it says: what it is (`Word`), a blank, the stream's number,
and behind `open` a blank and the `GenerateRequest` as JSON; whatever is wrong with that is its stream's matter. It
opens streams, and may hold, go on with and close each of them. The engine's body is chunked, too, and has a line for
each event of any stream: the stream's number, a blank, and the event as JSON (`engine_http.Event`). What
several streams have to say at once goes out in one write. A line of a number alone is that stream's blank line, which
says that it still waits for its turn; a line of nothing says nothing.

Numbers are the client's own, are counted upwards, and never come twice on a connection. A stream is over with its
`Finished`, `Failed` or `Refused`, or when the client closes it, which aborts it. The connection's end aborts all of
them. While a stream is held the engine keeps what it has to say, merged, and writes none of it: so one slow reader
stops nobody else's tokens. A client's line whose word or number can't be read, or which is too long, ends the
connection. A client that ends its body opens no more streams; the engine ends its own then, or when it shuts down, once
no stream is left.

Why lines over HTTP and not WebSocket or HTTP/2: both ends have an HTTP/1.1 parser in C already, with its bounds, its
key and its TLS; see docs/dev/adr/0043. A client that sends long requests, or asks for megabytes of log probabilities,
best opens a second connection for those, so that they delay no others.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MULTIPLEXED_PATH: Final = "/v1/multiplexed"
QUICK_LINE_BYTES: Final = 64 * 1024
"""A request of up to so many is parsed in a millisecond."""
MOST_LINE_BYTES: Final = 8 * 1024 * 1024
"""Of a request on a client's line."""
LINE_LIMIT_BYTES: Final = MOST_LINE_BYTES + 1024
"""A line with a request of `MOST_LINE_BYTES`."""
_MOST_DIGITS: Final = 15


class Word(StrEnum):
    """What a client's line says."""

    OPEN = "open"
    """Generate this, as a stream of that number."""
    CLOSE = "close"
    """Nothing more is wanted of it. May cross its end, and is nothing then."""
    HOLD = "hold"
    """Keep what comes for it until `GO_ON`."""
    GO_ON = "go_on"
    """Write of it again."""


@dataclass(frozen=True, slots=True)
class ClientLine:
    word: Word
    stream: int
    request: bytes = b""
    """Behind `open`: JSON, not looked at yet."""

    def written(self) -> bytes:
        """The line, with its end."""
        rest = b" " + self.request if self.word is Word.OPEN else b""
        return b"%b %d%b\n" % (self.word.encode(), self.stream, rest)


class UnreadableLineError(ValueError):
    """Nobody can say which stream was meant. The message shows none of the line's words."""


def client_line(line: bytes) -> ClientLine:
    """What a client's line, without its end, says; raises UnreadableLineError."""
    word, _, rest = line.partition(b" ")
    number, blank, request = rest.partition(b" ")
    try:
        known = Word(word.decode("ascii"))
    except ValueError:
        raise UnreadableLineError(f"a line of {len(line)} bytes begins with no known word") from None
    if (known is Word.OPEN) != bool(blank):
        raise UnreadableLineError(f"a line of {len(line)} bytes has too much or too little behind '{known}'")
    return ClientLine(known, stream_number(number), request)


def stream_number(written: bytes) -> int:
    """The number of a stream as it is written: in decimal digits, without any that it doesn't need.

    Raises UnreadableLineError.
    """
    if not written.isdigit() or len(written) > _MOST_DIGITS or (written[:1] == b"0" and written != b"0"):
        raise UnreadableLineError("a line has no stream's number where one belongs")
    return int(written)


class BrokenConnectionError(Exception):
    """The client doesn't keep to what is agreed: nothing more is read from it. The message shows none of its words."""


class LineCutter:
    """Cuts what comes into lines; holds no more than the beginning of one."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def cut(self, chunk: bytes) -> Iterable[bytes]:
        """The lines that are whole now, blank ones left out.

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
        """The client has written all it will.

        Raises:
            BrokenConnectionError: it stopped within a line.
        """
        if self._rest:
            raise BrokenConnectionError("its last line has no end")


def _check_length(line: bytes | bytearray) -> None:
    if len(line) > LINE_LIMIT_BYTES:
        raise BrokenConnectionError(f"a line is longer than {LINE_LIMIT_BYTES} bytes")
