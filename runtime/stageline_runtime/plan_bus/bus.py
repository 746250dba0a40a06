"""The plan bus: length-prefixed msgpack frames over TCP, between one engine and the stages of its group.

A plain socket rather than a message queue because the end of a peer must be seen at once: a killed process closes its
socket, and that is how a lost peer ends the group without waiting for a timeout. Frames are bounded; a frame that is
too long or malformed is a protocol error, never a guess.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

from stageline_runtime.plan_bus.messages import GroupFailed, Shutdown, ToEngine, ToStage

_LENGTH: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 1 << 18

Message = TypeVar("Message")


class BusClosedError(Exception):
    """The other side closed the connection or broke off."""


class BusProtocolError(Exception):
    """The other side sent something that isn't a message of this protocol."""


def encode_frame(message: ToEngine | ToStage) -> bytes:
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


_encoder = msgspec.msgpack.Encoder()


class FrameReader(Generic[Message]):
    """Turns a byte stream into messages, keeping the incomplete rest."""

    def __init__(self, message_type: object, most_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()
        self.most_bytes = most_bytes
        """The longest frame that is taken."""

    @property
    def incomplete(self) -> bytes:
        """What has come of the next message."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by `data`, in order.

        Raises:
            BusProtocolError: the frame is too long or doesn't decode.
        """
        self._buffer += data
        messages: list[Message] = []
        offset = 0
        while len(self._buffer) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, offset)
            if length > self.most_bytes:
                raise BusProtocolError(f"a frame of {length} bytes is longer than {self.most_bytes}")
            end = offset + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(memoryview(self._buffer)[offset + _LENGTH.size : end]))
            # A string that isn't UTF-8 is the one malformed input msgspec reports as something else.
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BusProtocolError(f"a frame does not decode: {error}") from error
            offset = end
        if offset:
            del self._buffer[:offset]
        return messages


class StageBus:
    """The stage's end: blocking; used by one thread only, but for `send` and what says otherwise."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        self._connection = connection
        self._sending = threading.RLock()  # a signal may come while its own thread sends
        self._reader: FrameReader[ToStage] = FrameReader(ToStage)
        self._received: deque[ToStage] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._waking: set[int] = set()
        """Descriptors that wake once; owned."""

    @classmethod
    def connect(cls, host: str, port: int, timeout_seconds: float) -> "StageBus":
        """Connect to the engine, trying again until it listens.

        Raises:
            TimeoutError: nobody answered in time; the message holds the last reason.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return cls(socket.create_connection((host, port), timeout=2.0))
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no engine at {host}:{port} within {timeout_seconds:g} s: {error}") from error
                time.sleep(0.1)

    def send(self, message: ToEngine) -> None:
        """Send one message, from any thread; blocks while the socket's buffer is full."""
        data = memoryview(encode_frame(message))
        with self._sending:
            while data:
                try:
                    data = data[self._connection.send(data) :]
                except BlockingIOError:
                    select.select([], [self._connection], [])
                except OSError as error:
                    raise BusClosedError(str(error)) from error

    def receive(self, timeout_seconds: float | None) -> ToStage | None:
        """The next message, or None when none came in time (0 only looks; None waits without end), or something else
        that wakes has happened."""
        if self._received:
            return self._received.popleft()
        timeout = None if timeout_seconds is None else max(0, int(timeout_seconds * 1000))
        for ready, _ in self._poll.poll(timeout):
            if ready == self._connection.fileno():
                self._read()
            else:
                self._poll.unregister(ready)
                self._waking.discard(ready)
                os.close(ready)
        return self._received.popleft() if self._received else None

    def received(self) -> ToStage | None:
        """A message that came together with one before; looks at no socket."""
        return self._received.popleft() if self._received else None

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise BusClosedError(str(error)) from error
        if not data:
            raise BusClosedError("the engine closed the plan bus")
        self._received.extend(self._reader.feed(data))

    def wake_once(self, descriptor: int) -> None:
        """`receive` returns, once, as soon as this can be read. The bus closes it: after that, or with itself."""
        self._poll.register(descriptor, select.POLLIN)
        self._waking.add(descriptor)

    def engine_hung_up(self) -> bool:
        """Whether the engine's side is closed; safe to ask from another thread, reads nothing."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def unread_end(self) -> GroupFailed | Shutdown | None:
        """The group's end that came while the reading thread was busy; safe to ask from any thread, takes nothing away.

        What is on the wire is looked at first: a message that is read meanwhile is found where it goes to.
        """
        unread: list[ToStage] = []
        with contextlib.suppress(OSError, BusProtocolError):
            data = self._connection.recv(_READ_BYTES, socket.MSG_PEEK)
            unread = FrameReader[ToStage](ToStage).feed(self._reader.incomplete + data)
        unread = [*self._received, *unread]
        return next((message for message in unread if isinstance(message, GroupFailed | Shutdown)), None)

    def close(self) -> None:
        self._connection.close()
        while self._waking:
            os.close(self._waking.pop())


class EngineBusConnection(asyncio.Protocol):
    """The engine's end of one stage's connection; calls back on each message and once on the end.

    Frames of more than `most_bytes` are refused until `trust`.
    """

    def __init__(
        self,
        on_message: Callable[["EngineBusConnection", ToEngine], None],
        on_lost: Callable[["EngineBusConnection", str], None],
        on_made: Callable[["EngineBusConnection"], None] = lambda _connection: None,
        most_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_made = on_made
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine, most_bytes)
        self._transport: asyncio.Transport | None = None
        self.stage: int | None = None
        """Set once the handshake has told which stage this is."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._on_made(self)

    def trust(self) -> None:
        """The other end has shown who it is: from now on it may send what a stage sends."""
        self._reader.most_bytes = MAX_FRAME_BYTES

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came; a malformed frame ends the connection."""
        try:
            messages = self._reader.feed(data)
        except BusProtocolError as error:
            self.close()
            self._on_lost(self, str(error))
            return
        for message in messages:
            self._on_message(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self, str(exc) if exc else "closed the plan bus")

    def send_frame(self, frame: bytes) -> None:
        """Queue an encoded frame; asyncio writes it at once when the socket takes it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
