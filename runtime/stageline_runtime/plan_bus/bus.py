"""The plan bus: length-prefixed msgpack frames over TCP, between one engine and the stages of its group.

It uses a plain socket, not a message queue, because the loss of a peer must be noticed at once. A killed process closes
its socket, so a lost peer ends the group without a timeout. Frames are bounded; a frame that is too long or malformed
is a protocol error. With `spec.network.tls` the same frames cross in a TLS channel. Its handshake counts against the
time limit of an unauthenticated connection.
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

from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    GroupFailed,
    PeerComputes,
    Place,
    Refused,
    Shutdown,
    ToEngine,
    ToStage,
)
from stageline_runtime.tls.certificates import PodIdentity, TlsError
from stageline_runtime.tls.channel import TlsChannel

_LENGTH: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 1 << 18

Message = TypeVar("Message")


class BusClosedError(Exception):
    """The other side closed the connection or broke off."""


class BusRefusedError(BusClosedError):
    """TLS ended the connection: one end doesn't take the other for one of the model's."""


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
    """The stage's end: blocking; used by one thread only, except `send` and methods documented otherwise."""

    def __init__(self, connection: socket.socket, identity: PodIdentity | None = None) -> None:
        """Without `identity` it sends in clear."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        self._connection = connection
        self._channel = None if identity is None else TlsChannel(identity, is_server=False)
        self._sending = threading.RLock()  # a signal may come while its own thread sends
        self._is_sending = False
        self._unsent: deque[bytes] = deque()
        self._reading = threading.Lock()
        self._reader: FrameReader[ToStage] = FrameReader(ToStage)
        self._received: deque[ToStage] = deque()
        self._peer_computed_at = float("-inf")
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @classmethod
    def connect(cls, host: str, port: int, timeout_seconds: float, identity: PodIdentity | None = None) -> "StageBus":
        """Connect to the engine, retrying until it listens; with an `identity`, by TLS.

        Raises:
            TimeoutError: no engine answered in time; the message holds the last reason.
            BusClosedError: the peer closed the connection, or, with TLS, isn't the model's engine.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=2.0)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no engine at {host}:{port} within {timeout_seconds:g} s: {error}") from error
                time.sleep(0.1)
        bus = cls(connection, identity)
        try:
            while bus._channel is not None and not bus._channel.is_open:
                bus._write(b"")  # what TLS itself has to say
                if (left_seconds := deadline - time.monotonic()) <= 0:
                    raise TimeoutError("the engine did not finish the TLS handshake in time")
                bus._wait(left_seconds)
            bus._write(b"")
        except BaseException:
            with contextlib.suppress(BusClosedError):
                bus._write(b"")  # its last word may say why
            bus.close()
            raise
        return bus

    def send(self, message: ToEngine) -> None:
        """Send one message, from any thread; blocks while the socket's buffer is full.

        A signal's handler that comes within another send of its own thread leaves its message to that one.
        """
        self._unsent.append(encode_frame(message))
        with self._sending:
            while self._unsent and not self._is_sending:
                self._is_sending = True
                try:
                    self._write(self._unsent.popleft())
                finally:
                    self._is_sending = False

    def send_if_free(self, message: ToEngine) -> None:
        """Send a short message where that waits for nothing, neither the socket nor another thread's send; else not."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            if select.select([], [self._connection], [], 0)[1]:
                self.send(message)
        finally:
            self._sending.release()

    def _write(self, frame: bytes) -> None:
        if self._channel is not None:
            self._channel.seal(frame)
            frame = self._channel.outgoing()
        data = memoryview(frame)
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
        if not self._received:
            if timeout_seconds == 0:
                self._read()  # a poll before it would be one more system call in each step
            else:
                self._wait(timeout_seconds)
        return self.received()

    def _wait(self, timeout_seconds: float | None) -> None:
        """Read once the connection has something; return as well once something else wakes."""
        timeout = None if timeout_seconds is None else max(0, int(timeout_seconds * 1000))
        for ready, _ in self._poll.poll(timeout):
            if ready == self._connection.fileno():
                self._read()
            else:
                self._poll.unregister(ready)
                os.close(ready)

    def received(self) -> ToStage | None:
        """A message that has been read; looks at no socket."""
        return self._received.popleft() if self._received else None

    def _read(self) -> None:
        """Take all that lies on the wire to where `receive` finds it; waits for nothing, from any thread."""
        with self._reading:
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise BusClosedError(str(error)) from error
            if not data:
                raise BusClosedError("the engine closed the plan bus")
            if self._channel is not None:
                try:
                    data = self._channel.opened(data)
                except TlsError as error:
                    raise BusRefusedError(f"TLS on the plan bus ended: {error}") from error
            for message in self._reader.feed(data):
                if isinstance(message, PeerComputes):
                    self._peer_computed_at = time.monotonic()
                else:
                    self._received.append(message)

    def wake_once(self, descriptor: int) -> None:
        """`receive` returns, once, as soon as this can be read, and closes it."""
        self._poll.register(descriptor, select.POLLIN)

    def engine_hung_up(self) -> bool:
        """Whether the engine's side is closed; safe to ask from another thread, reads nothing."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        return any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def unread_end(self) -> GroupFailed | Shutdown | None:
        """The group's end that came while the reading thread was busy; safe to ask from any thread.

        What is on the wire goes to where `receive` finds it, and none of it is taken away.
        """
        with contextlib.suppress(BusClosedError, BusProtocolError):
            self._read()
        return next((message for message in tuple(self._received) if isinstance(message, GroupFailed | Shutdown)), None)

    def peer_computed_at(self) -> float:
        """When the engine last said that another stage computes (monotonic); safe to ask from any thread."""
        with contextlib.suppress(BusClosedError, BusProtocolError):
            self._read()
        return self._peer_computed_at

    def close(self) -> None:
        self._connection.close()


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
        channel: TlsChannel | None = None,
    ) -> None:
        """`channel` belongs to this connection alone; None sends and receives in clear."""
        self._channel = channel
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_made = on_made
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine, most_bytes)
        self._transport: asyncio.Transport | None = None
        self.place: Place | None = None
        """Set once the handshake has told which process of the group this is."""
        self.address = ""
        """Where the other end connected from."""
        self.fault = ""
        """What the other end did that ended the connection; empty while it did nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._on_made(self)

    def trust(self) -> None:
        """The peer has authenticated: from now on it may send a stage's messages."""
        self._reader.most_bytes = MAX_FRAME_BYTES

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came; what breaks the protocol ends the connection, and so does what TLS refuses."""
        try:
            for message in self._reader.feed(self._opened(data)):
                self._on_message(self, message)
        except (BusProtocolError, TlsError) as error:
            self.fault = str(error)
            self.close()
            self._on_lost(self, self.fault)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is over; told here, unless a fault has ended it."""
        if not self.fault:
            self._on_lost(self, str(exc) if exc else "closed the plan bus")

    def send_frame(self, frame: bytes) -> None:
        """Queue an encoded frame; asyncio writes it at once when the socket takes it."""
        if self._channel is None:
            self._write(frame)
            return
        self._channel.seal(frame)
        self._write(self._channel.outgoing())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _opened(self, data: bytes) -> bytes:
        if self._channel is None:
            return data
        try:
            return self._channel.opened(data)
        except TlsError as error:
            self._channel.refuse(encode_frame(Refused(str(error))))
            raise
        finally:
            self._write(self._channel.outgoing())

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
