"""What the bench's engines read and write, on a shared connection and on the own ones of clients without a gateway."""

import json
from collections.abc import Iterator
from typing import Final

from stageline_api.health import EngineStatus, Phase
from stageline_api.multiplexing import MULTIPLEXED_PATH, ClientLine, LineCutter, client_line

SERVED_NAME: Final = "synthetic"
HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
END: Final = b"0\r\n\r\n"
WORD: Final = " word"
ADMITTED: Final = b'{"type":"admitted","prompt_tokens":8}\n'
TOKEN: Final = json.dumps({"type": "delta", "text": WORD, "token_ids": [7]}, separators=(",", ":")).encode() + b"\n"
SHARED: Final = f"POST {MULTIPLEXED_PATH} ".encode()
"""Begins the request for a connection that many streams share."""


def finished(tokens: int) -> bytes:
    """The line that ends a stream."""
    end = {"type": "finished", "reason": "length", "prompt_tokens": 8, "completion_tokens": tokens}
    return json.dumps(end).encode() + b"\n"


def chunk(content: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def of_stream(number: int | None, line: bytes) -> bytes:
    """`line` on a connection that is shared, or on one without numbers."""
    return line if number is None else b"%d %b" % (number, line)


def status() -> bytes:
    """The answer to a probe."""
    found = EngineStatus(phase=Phase.READY, served_name=SERVED_NAME).model_dump_json().encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(found) + found


class SharedBody:
    """The lines of a chunked body, as its bytes come."""

    def __init__(self) -> None:
        self._unread = b""
        self._cutter = LineCutter()

    def feed(self, content: bytes) -> Iterator[ClientLine]:
        """What clients said, in whole lines."""
        self._unread += content
        while True:
            size, found, after = self._unread.partition(b"\r\n")
            if not found or len(after) < (length := int(size, 16)) + 2:
                return
            self._unread = after[length + 2 :]
            yield from map(client_line, self._cutter.cut(after[:length]))
