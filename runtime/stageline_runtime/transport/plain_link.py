"""Connections in clear between two stages: what sends and what receives, at the least that a step can pay for them.

A tensor is one `message` and one call of the kernel at each end, straight from and to its memory. Between two steps
little of torch's own code is left in a core's caches, and a view made by it costs more than the kernel's part: so a
sent tensor is reached by its address, and small tensors are received into buffers that are used in turn. Both ends
derive order and sizes from plans; what comes must be what is expected.

No thread has a part in it while the kernel takes a tensor whole, as it does those of every decode step. What it does
not take of the tensor of a long prompt a thread writes, so that the stage computes on; later tensors queue behind it.
"""

import ctypes
import queue
import socket
import struct
import threading
import time
from collections import deque
from typing import Any, Final

import torch
from torch import Tensor

from stageline_runtime.transport.message import HEADER, Arrivals, check_header, hang_up

RECEIVE_RING: Final = 8
"""Received tensors of one shape before the first one's memory is written again: more than the sends that may be
outstanding, since a plan that is not computed sends on what it received."""
MOST_RING_BYTES: Final = 256 << 10
"""The largest tensor that is received into a ring; others get memory of their own."""
_ALIGNMENT: Final = 64
_TIMEVAL: Final = struct.Struct("@ll")


class PlainSender:
    """The end that sends; its calls come from one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._rests: queue.SimpleQueue[_Sending] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._outstanding: deque[_Sending] = deque()
        """What the thread was given and has not been seen to end."""
        self._bytes: dict[int, Any] = {}
        """Types of as many bytes."""
        self._failure = ""

    def send(self, tensor: Tensor, tag: int) -> None:
        """Send a contiguous tensor, which nobody may write to from now on; raises RuntimeError."""
        size = tensor.nbytes
        kind = self._bytes.get(size)
        if kind is None:
            kind = self._bytes[size] = ctypes.c_char * size
        data = kind.from_address(tensor.data_ptr())
        header = HEADER.pack(tag, size)
        is_behind = self.outstanding() > 0
        if self._failure:
            raise RuntimeError(self._failure)
        sent = 0 if is_behind else self._send_now(header, data)
        if sent < len(header) + size:
            message = [header[sent:]] if sent < len(header) else []
            rest = memoryview(data).cast("B")[max(0, sent - len(header)) :]
            self._leave_to_thread([*message, rest], tensor)

    def outstanding(self) -> int:
        """Tensors that the kernel hasn't taken whole."""
        while self._outstanding and self._outstanding[0].is_done.is_set():
            ended = self._outstanding.popleft()
            self._failure = self._failure or ended.failure
        return len(self._outstanding)

    def await_oldest(self, timeout_seconds: float) -> None:
        """Until the kernel has the oldest outstanding tensor; raises RuntimeError."""
        if not self._outstanding[0].is_done.wait(timeout_seconds):
            raise RuntimeError("timed out waiting for room on the wire")

    def abort(self) -> None:
        """Hang up."""
        hang_up(self._connection)

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
        work = _Sending(pieces, tensor)
        self._outstanding.append(work)
        self._rests.put(work)

    def _write_rests(self) -> None:
        failure = ""
        while True:
            work = self._rests.get()
            try:
                for piece in work.pieces if not failure else ():
                    self._connection.sendall(piece)
            except OSError as error:
                failure = str(_lost(error))
            work.finish(failure)


class PlainReceiver:
    """The end that receives; its calls come from one thread."""

    def __init__(self, connection: socket.socket, dtype: torch.dtype, width: int, timeout_seconds: float) -> None:
        """For tensors `[rows, width]`; no wait is meant to take longer than `timeout_seconds`."""
        connection.settimeout(None)
        # The kernel's own limit: Python's would ask the kernel once more for each tensor.
        seconds = int(timeout_seconds)
        limit = _TIMEVAL.pack(seconds, int((timeout_seconds - seconds) * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._connection = connection
        self._dtype = dtype
        self._width = width
        self._timeout_seconds = timeout_seconds
        self._rings: dict[int, deque[_Incoming]] = {}
        """Used in turn, by the number of rows."""
        self._arrivals = Arrivals(connection)

    def has_come(self) -> bool:
        """Whether something of the next tensor is there, or the other end is gone; never waits."""
        return self._arrivals.any()

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

    def abort(self) -> None:
        """Hang up."""
        hang_up(self._connection)

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
            count += self._read(message[count:], socket.MSG_WAITALL if is_checked else 0)
            if time.monotonic() > deadline:
                raise RuntimeError("timed out waiting for the other end")

    def _read(self, view: memoryview, flags: int = 0) -> int:
        """How many bytes came, at least one."""
        try:
            count = self._connection.recv_into(view, 0, flags)
        except BlockingIOError as error:
            raise RuntimeError("timed out waiting for the other end") from error
        except OSError as error:
            raise _lost(error) from error
        if not count:
            raise RuntimeError("the connection is lost: the other end closed it")
        return count


class _Sending:
    """What the thread still has to write of a tensor, which it keeps alive."""

    def __init__(self, pieces: "list[bytes | memoryview]", tensor: Tensor) -> None:
        self.pieces = pieces
        self._tensor: Tensor | None = tensor
        self.is_done = threading.Event()
        self.failure = ""

    def finish(self, failure: str) -> None:
        """For the thread: it is written, or could not be."""
        self.failure = failure
        self.pieces = []
        self._tensor = None
        self.is_done.set()


class _Incoming:
    """Memory for one tensor `[rows, width]` and, right before it, its header."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        begin = _ALIGNMENT + rows * width * dtype.itemsize
        memory = torch.empty(begin, dtype=torch.uint8)
        self.tensor = memory[_ALIGNMENT:].view(dtype).view(rows, width)
        data: Any = memory.numpy()
        self.message = memoryview(data)[_ALIGNMENT - HEADER.size :]


def _lost(error: OSError) -> RuntimeError:
    return RuntimeError(f"the connection is lost: {error.strerror or error}")
