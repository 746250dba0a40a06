"""How a tensor crosses on a connection of the runtime's own: a tag and a length, then its bytes.

Both ends derive order and sizes from plans, so a header only confirms what is expected.
"""

import select
import socket
import struct
from contextlib import suppress
from typing import Final

HEADER: Final = struct.Struct("<QQ")
"""Tag, and length in bytes."""


class Arrivals:
    """Whether anything has come on a connection, or its other end is gone; asking never waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def any(self) -> bool:
        return bool(self._poll.poll(0))


def check_header(message: bytes | bytearray | memoryview, tag: int, length: int) -> None:
    """Raises RuntimeError: `message` begins with the header of another tensor than the one that is expected."""
    found_tag, found_length = HEADER.unpack_from(message)
    if (found_tag, found_length) != (tag, length):
        came, expected = f"{found_length} bytes with tag {found_tag}", f"{length} with tag {tag}"
        raise RuntimeError(f"{came} came where {expected} were expected")


def hang_up(connection: socket.socket) -> None:
    """Close, waking whichever thread waits on it."""
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
