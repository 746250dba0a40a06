"""The supervisor's end of a socket to one worker: never waits for it, and keeps so much and no more that is unread."""

import socket
from collections.abc import Iterator
from typing import Final

import msgspec

from stageline_gateway.workers.messages import Frames, FromWorker, Message, frame

MOST_UNREAD_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 256 * 1024


class Channel:
    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._frames = Frames(msgspec.msgpack.Decoder(FromWorker))
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """To a worker that doesn't read, or has ended, nothing is sent any more: it is looked after elsewhere."""
        if len(self._unsent) <= MOST_UNREAD_BYTES:
            self._unsent += frame(message)
            self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def messages(self) -> Iterator[FromWorker]:
        """Those that have come. Raises EOFError when the worker's end is closed, and FrameError."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise EOFError
        yield from self._frames.take(data)  # type: ignore[misc]

    def close(self) -> None:
        self.socket.close()
