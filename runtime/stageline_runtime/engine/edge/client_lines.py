"""What a client writes on a connection that carries many generations: bytes in, whole lines out, bounded.

What a line says is `stageline_api.multiplexing`'s to read. A line that is too long, or has no end, is the connection's
matter: nobody can say which stream was meant.
"""

from collections.abc import Iterable
from typing import Final

from stageline_api.multiplexing import MOST_LINE_BYTES

LINE_LIMIT_BYTES: Final = MOST_LINE_BYTES + 1024
"""A request of `MOST_LINE_BYTES`, and what says that it is one, and whose."""


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
