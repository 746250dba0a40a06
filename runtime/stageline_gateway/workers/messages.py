"""What supervisor and workers say over the socket between them: frames of a length and a msgpack object.

The supervisor reads no report: it passes on what one worker tells another, and keeps the last of each.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

MOST_FRAME_BYTES: Final = 64 * 1024 * 1024
_LENGTH_BYTES: Final = 4


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One frame."""


class Alive(Message, frozen=True):
    """A worker's event loop runs. Said every `ALIVE_SECONDS`."""


class Serving(Message, frozen=True):
    """A worker takes requests."""


class Failed(Message, frozen=True):
    """A worker can't start, for a reason that people can mend."""

    message: str
    exit_code: int


class Told(Message, frozen=True):
    """A worker's report, as an answer to `Tell` or, with the number 0, of its own accord."""

    number: int
    topic: str
    body: bytes


class Ask(Message, frozen=True):
    """A worker wants to know what all of them say on a topic; answered by `Answered` with its number."""

    number: int
    topic: str


class Drain(Message, frozen=True):
    """Take no more requests: from the worker that was told so to the supervisor, and from that to all."""


class Begin(Message, frozen=True):
    """To a new worker: what the one before it in its place had counted at last, and how often that place was lost."""

    counted: bytes
    times_lost: int


class Tell(Message, frozen=True):
    """To a worker: report on a topic."""

    number: int
    topic: str


class Said(msgspec.Struct, frozen=True):
    """What a place among the workers says: by its worker, or, while it has none, the last that one said."""

    worker: int
    is_alive: bool
    body: bytes


class Answered(Message, frozen=True):
    """To the worker that asked."""

    number: int
    said: tuple[Said, ...]
    silent: tuple[int, ...] = ()
    """Workers that did not answer in time."""


class Stop(Message, frozen=True):
    """To all workers: end, once open answers have."""

    withdraw: bool
    """Whether load balancers are given their time first."""
    at_once: bool = False


FromWorker = Alive | Serving | Failed | Told | Ask | Drain
ToWorker = Begin | Tell | Answered | Drain | Stop


class FrameError(Exception):
    """What came is no message; the connection can't be used any more."""


def frame(message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Frames:
    """Cuts bytes into messages of some types."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[FromWorker] | msgspec.msgpack.Decoder[ToWorker]) -> None:
        self._decoder = decoder
        self._rest = bytearray()

    def take(self, data: bytes) -> Iterator[FromWorker | ToWorker]:
        """The messages that `data` completes. Raises FrameError."""
        self._rest += data
        while len(self._rest) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._rest[:_LENGTH_BYTES], "big")
            if end > MOST_FRAME_BYTES:
                raise FrameError(f"a message of {end} bytes, {MOST_FRAME_BYTES} at most")
            if len(self._rest) < end:
                return
            try:
                message = self._decoder.decode(bytes(self._rest[_LENGTH_BYTES:end]))
            except msgspec.DecodeError as error:
                raise FrameError(str(error)) from None
            del self._rest[:end]
            yield message
