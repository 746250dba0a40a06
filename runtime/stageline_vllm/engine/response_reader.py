"""One HTTP/1.1 response, however its bytes are split: a status, then the lines of its body. Pure.

Reads what vLLM's server sends: bodies in chunks, of a known length, or up to the connection's end. Memory is bounded by
the longest line.
"""

from typing import Final

HEAD_LIMIT_BYTES: Final = 64 * 1024
LINE_LIMIT_BYTES: Final = 8 * 1024 * 1024


class ResponseError(Exception):
    """These bytes are no such response; a sentence about why."""


class ResponseReader:
    def __init__(self) -> None:
        self.status = 0
        """0 until the head has come."""
        self.is_complete = False
        self._unread = b""
        self._line = b""
        self._is_chunked = False
        self._left: int | None = None
        """Bytes of the body, or of the chunk, that are still to come; None: up to the connection's end."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; returns the body's lines that they complete, without blank ones.

        Raises:
            ResponseError: they are no HTTP/1.1, or a line is longer than can be.
        """
        self._unread += data
        if not self.status and not self._read_head():
            return []
        body = self._read_chunks() if self._is_chunked else self._read_plain()
        *lines, self._line = (self._line + body).split(b"\n")
        if len(self._line) > LINE_LIMIT_BYTES:
            raise ResponseError("vLLM sent an event that is too long")
        if self.is_complete and self._line:
            lines.append(self._line)
            self._line = b""
        return [line for line in map(bytes.strip, lines) if line]

    def end(self) -> list[bytes]:
        """The connection has ended; returns what that completes of a body without a length."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_complete = True
        return self.feed(b"")

    def _read_head(self) -> bool:
        head, end, rest = self._unread.partition(b"\r\n\r\n")
        if not end:
            if len(self._unread) > HEAD_LIMIT_BYTES:
                raise ResponseError("what answers at vLLM's address does not speak HTTP")
            return False
        first, *fields = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not first.startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise ResponseError("what answers at vLLM's address does not speak HTTP")
        named = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        self.status, self._unread = int(words[1]), rest
        self._is_chunked = named.get("transfer-encoding", "").lower() == "chunked"
        if self._is_chunked:
            self._left = 0
        elif (length := named.get("content-length")) is not None:
            self._left = _size(length, 10)
        return True

    def _read_plain(self) -> bytes:
        body, self._unread = self._unread, b""
        if self._left is not None:
            body = body[: self._left]
            self._left -= len(body)
            self.is_complete = self._left == 0
        return body

    def _read_chunks(self) -> bytes:
        parts: list[bytes] = []
        while self._unread and not self.is_complete:
            if self._left:
                part = self._unread[: self._left]
                self._left -= len(part)
                self._unread = self._unread[len(part) :]
                parts.append(part)
                continue
            # The line break that ends a chunk precedes the next one's size.
            size, end, rest = self._unread.removeprefix(b"\r\n").partition(b"\r\n")
            if not end:
                if len(self._unread) > HEAD_LIMIT_BYTES:
                    raise ResponseError("vLLM sent a chunk without a size")
                break
            self._left, self._unread = _size(size.partition(b";")[0].decode("latin-1"), 16), rest
            self.is_complete = self._left == 0
        return b"".join(parts)


def _size(digits: str, base: int) -> int:
    try:
        size = int(digits, base)
    except ValueError:
        size = -1
    if size < 0:
        raise ResponseError(f"vLLM sent a body of size {digits[:20]!r}")
    return size
