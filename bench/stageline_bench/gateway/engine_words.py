"""Parsing and formatting of the benchmark's engines, for shared connections and for connections of one stream."""

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
"""Start of the request for a shared connection."""


def finished(tokens: int) -> bytes:
    """The final line of a stream."""
    end = {"type": "finished", "reason": "length", "prompt_tokens": 8, "completion_tokens": tokens}
    return json.dumps(end).encode() + b"\n"


def chunk(content: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def of_stream(number: int | None, line: bytes) -> bytes:
    """`line` on a shared connection, or without a number on another one."""
    return line if number is None else b"%d %b" % (number, line)


def status() -> bytes:
    """The response to a probe."""
    found = EngineStatus(phase=Phase.READY, served_name=SERVED_NAME).model_dump_json().encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(found) + found


class SharedBody:
    """The lines of a chunked body, from its bytes as they arrive."""

    def __init__(self) -> None:
        self._unread = b""
        self._cutter = LineCutter()

    def feed(self, content: bytes) -> Iterator[ClientLine]:
        """Complete lines of clients."""
        self._unread += content
        while True:
            size, found, after = self._unread.partition(b"\r\n")
            if not found or len(after) < (length := int(size, 16)) + 2:
                return
            self._unread = after[length + 2 :]
            yield from map(client_line, self._cutter.cut(after[:length]))
