"""Connections between two stages, in clear or in TLS: the sender and the receiver, at the lowest cost per step.

A tensor is one message and one system call at each end, directly from and to its memory. Between two steps little of
torch's code stays in a core's caches, and a view made by torch costs more than the system call. So a sent tensor is
accessed by its address, and small tensors are received into alternating buffers. Both ends derive order and sizes from
plans; received data must match them.

If the kernel accepts a whole tensor, as in every decode step, no thread is involved. A thread writes the rest of a long
prompt's tensor so that the stage continues to compute; later tensors queue behind it. In TLS the thread writes all
tensors: encryption runs beside the stage, and OpenSSL has no way to avoid waiting.
"""

import ctypes
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import Any, Final

import torch
from torch import Tensor

from stageline_runtime.tls.certificates import words_of

HEADER: Final = struct.Struct("<QQ")
"""Before each tensor: a tag, and its length in bytes. Both ends know them from plans, so they only confirm."""
RECEIVE_RING: Final = 8
"""Received tensors of one shape before the first one's memory is written again: more than the sends that may be
outstanding, since a plan that is not computed sends on what it received."""
MOST_RING_BYTES: Final = 256 << 10
"""The largest tensor that is received into a ring; others get memory of their own."""
_ALIGNMENT: Final = 64
_TIMEVAL: Final = struct.Struct("@ll")


class SocketSender:
    """The end that sends; its calls come from one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._rests: queue.SimpleQueue[tuple[Future[str], list[bytes | memoryview], Tensor]] = queue.SimpleQueue()
        """What the thread still has to write, and the tensor that this is of, which lives as long."""
        self._writer: threading.Thread | None = None
        self._outstanding: deque[Future[str]] = deque()
        """What the thread was given and has not been seen to end, with why it failed."""
        self._bytes: dict[int, Any] = {}
        """Types of as many bytes."""
        self._failure = ""

    def send(self, tensor: Tensor, tag: int) -> None:
        """Send a contiguous tensor, which must not be written to after this call; raises RuntimeError."""
        size = tensor.nbytes
        kind = self._bytes.get(size)
        if kind is None:
            kind = self._bytes[size] = ctypes.c_char * size
        data = kind.from_address(tensor.data_ptr())
        header = HEADER.pack(tag, size)
        is_behind = self.outstanding() > 0
        if self._failure:
            raise RuntimeError(self._failure)
        sent = 0 if is_behind or self._is_tls else self._send_now(header, data)
        if sent < len(header) + size:
            rest = memoryview(data).cast("B")[max(0, sent - len(header)) :]
            self._leave_to_thread([header[sent:], rest], tensor)

    def outstanding(self) -> int:
        """Tensors that the kernel hasn't taken whole."""
        while self._outstanding and self._outstanding[0].done():
            ended = self._outstanding.popleft()
            self._failure = self._failure or ended.result()
        return len(self._outstanding)

    def await_oldest(self, timeout_seconds: float) -> None:
        """Until the kernel has the oldest outstanding tensor; raises RuntimeError."""
        if not wait([self._outstanding[0]], timeout_seconds).done:
            raise RuntimeError("timed out waiting for room on the wire")

    def _send_now(self, header: bytes, data: Any) -> int:
        """How many bytes the kernel took without waiting."""
        try:
            return self._connection.sendmsg((header, data), (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _lost(error) from error

    def _leave_to_thread(self, pieces: list[bytes | memoryview], tensor: Tensor) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_rests, name="sends of long prompts", daemon=True)
            self._writer.start()
        self._outstanding.append(Future())
        self._rests.put((self._outstanding[-1], pieces, tensor))

    def _write_rests(self) -> None:
        failure = ""
        while True:
            ended, pieces, tensor = self._rests.get()
            try:
                # Two calls would make two records of TLS.
                for piece in [b"".join(pieces)] if self._is_tls else pieces:
                    if not failure:
                        self._connection.sendall(piece)
            except (OSError, ValueError) as error:  # ValueError: TLS has ended
                failure = str(_lost(error))
            del pieces, piece, tensor  # nothing is kept until the next one
            ended.set_result(failure)


class SocketReceiver:
    """The end that receives; its calls come from one thread."""

    def __init__(self, connection: socket.socket, dtype: torch.dtype, width: int, timeout_seconds: float) -> None:
        """For tensors `[rows, width]`; no wait is meant to take longer than `timeout_seconds`."""
        self._tls = connection if isinstance(connection, ssl.SSLSocket) else None
        if self._tls is None:
            _limit_by_kernel(connection, timeout_seconds)
        else:
            connection.settimeout(timeout_seconds)
        self._connection = connection
        self._dtype = dtype
        self._width = width
        self._timeout_seconds = timeout_seconds
        self._rings: dict[int, deque[_Incoming]] = {}
        """Alternating buffers, by the number of rows."""
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)

    def has_come(self) -> bool:
        """Whether something of the next tensor is there, or the other end is gone; never waits."""
        return (self._tls is not None and self._tls.pending() > 0) or bool(self._arrivals.poll(0))

    def receive(self, rows: int, tag: int) -> Tensor:
        """The next tensor `[rows, width]`, which must have this tag; raises RuntimeError.

        It is good until `RECEIVE_RING` more of this shape were received.
        """
        incoming = self._next_buffer(rows)
        message = incoming.message
        count = self._read(message)
        if count < len(message):
            self._read_rest(message, count, tag)
        check_header(message, tag, len(message) - HEADER.size)
        return incoming.tensor

    def _next_buffer(self, rows: int) -> "_Incoming":
        ring = self._rings.get(rows)
        if ring is not None and len(ring) == RECEIVE_RING:
            ring.rotate(-1)
            return ring[-1]
        incoming = _Incoming(rows, self._width, self._dtype)
        if len(incoming.message) <= MOST_RING_BYTES:
            self._rings.setdefault(rows, deque()).append(incoming)
        return incoming

    def _read_rest(self, message: memoryview, count: int, tag: int) -> None:
        """What did not come at once."""
        deadline = time.monotonic() + self._timeout_seconds
        is_checked = False
        while count < len(message):
            if not is_checked and count >= HEADER.size:
                check_header(message, tag, len(message) - HEADER.size)
                is_checked = True
            count += self._read(message[count:], socket.MSG_WAITALL if is_checked and self._tls is None else 0)
            if time.monotonic() > deadline:
                raise RuntimeError("timed out waiting for the other end")

    def _read(self, view: memoryview, flags: int = 0) -> int:
        """How many bytes came, at least one."""
        try:
            count = self._connection.recv_into(view, 0, flags)
        except (BlockingIOError, TimeoutError) as error:
            raise RuntimeError("timed out waiting for the other end") from error
        except (OSError, ValueError) as error:  # ValueError: TLS has ended
            raise _lost(error) from error
        if not count:
            raise RuntimeError("the connection is lost: the other end closed it")
        return count


class _Incoming:
    """Memory for one tensor `[rows, width]` and, right before it, its header."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        begin = _ALIGNMENT + rows * width * dtype.itemsize
        memory = torch.empty(begin, dtype=torch.uint8)
        self.tensor = memory[_ALIGNMENT:].view(dtype).view(rows, width)
        data: Any = memory.numpy()
        self.message = memoryview(data)[_ALIGNMENT - HEADER.size :]


def check_header(message: bytes | bytearray | memoryview, tag: int, length: int) -> None:
    """Raises RuntimeError: `message` begins with the header of another tensor than the one that is expected."""
    found_tag, found_length = HEADER.unpack_from(message)
    if (found_tag, found_length) != (tag, length):
        came, expected = f"{found_length} bytes with tag {found_tag}", f"{length} with tag {tag}"
        raise RuntimeError(f"{came} came where {expected} were expected")


def _limit_by_kernel(connection: socket.socket, timeout_seconds: float) -> None:
    """Python's own limit would ask the kernel once more for each tensor."""
    connection.settimeout(None)
    seconds = int(timeout_seconds)
    limit = _TIMEVAL.pack(seconds, int((timeout_seconds - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _lost(error: OSError | ValueError) -> RuntimeError:
    return RuntimeError(f"the connection is lost: {words_of(error)}")
