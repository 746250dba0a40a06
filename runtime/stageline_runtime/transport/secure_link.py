"""TLS connections between two stages, each used in one direction, as a group of `PointToPointTransport`.

gloo has no TLS in the torch wheels that there are, so with `spec.network.tls` tensors cross here. Both ends derive
order and sizes from plans, so bytes alone cross, with a tag before each tensor that must be the one expected. A thread
sends, so that a stage computes on while the wire is full. A receive is read off the socket by whoever waits for it:
until then it lies in the kernel, and a full one holds the sender back.
"""

import queue
import ssl
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from stageline_runtime.tls.certificates import words_of
from stageline_runtime.transport.message import HEADER, Arrivals, check_header, hang_up


class SecureSender:
    """The end that sends; its calls come from one thread."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.settimeout(None)
        self._connection = connection
        self._queue: queue.SimpleQueue[tuple[bytes, memoryview, _Sending]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="secure sends", daemon=True).start()

    def send(self, tensor: Tensor, tag: int) -> "_Sending":
        """Queue a contiguous tensor, which must stay as it is until the handle was waited for."""
        data = _bytes_of(tensor)
        work = _Sending()
        self._queue.put((HEADER.pack(tag, len(data)), data, work))
        return work

    def abort(self) -> None:
        hang_up(self._connection)

    def _run(self) -> None:
        failure = ""
        while True:
            header, data, work = self._queue.get()
            try:
                if not failure:
                    self._connection.sendall(b"".join((header, data)))  # two calls would make two records
            except (OSError, ValueError) as error:
                failure = f"the connection is lost: {words_of(error)}"
            work.finish(failure)


class SecureReceiver:
    """The end that receives; its calls come from one thread."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection
        self._posted: deque[_Receiving] = deque()
        self._arrivals = Arrivals(connection)

    def receive(self, tensor: Tensor, tag: int) -> "_Receiving":
        """Post a receive into a contiguous tensor; receives complete in the order in which they are posted."""
        work = _Receiving(self, tag, _bytes_of(tensor))
        self._posted.append(work)
        return work

    def abort(self) -> None:
        hang_up(self._connection)

    def has_come(self, work: "_Receiving") -> bool:
        """Whether `work` is done, or something lies there of what is read next."""
        return work.is_done or self._connection.pending() > 0 or self._arrivals.any()

    def read_until(self, work: "_Receiving", deadline: float) -> None:
        """Read all that is posted up to `work`; raises RuntimeError."""
        while not work.is_done:
            self._read(self._posted[0], deadline)
            self._posted.popleft().is_done = True

    def _read(self, work: "_Receiving", deadline: float) -> None:
        header = bytearray(HEADER.size)
        self._fill(memoryview(header), deadline)
        check_header(header, work.tag, len(work.data))
        self._fill(work.data, deadline)

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view:
            try:
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
                count = self._connection.recv_into(view)
            except TimeoutError as error:
                raise RuntimeError("timed out waiting for the other end") from error
            except (OSError, ValueError) as error:
                raise RuntimeError(f"the connection is lost: {words_of(error)}") from error
            if not count:
                raise RuntimeError("the connection is lost: the other end closed it")
            view = view[count:]


class SecureGroup:
    """The connections of one kind of tensor at one stage, in the form that `PointToPointTransport` asks for."""

    def __init__(self, sender: SecureSender | None, receiver: SecureReceiver | None) -> None:
        self._sender = sender
        self._receiver = receiver

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> "_Sending":
        assert self._sender is not None, f"nothing of this kind goes to stage {peer}"
        (tensor,) = tensors
        return self._sender.send(tensor, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "_Receiving":
        assert self._receiver is not None, f"nothing of this kind comes from stage {peer}"
        (tensor,) = tensors
        return self._receiver.receive(tensor, tag)

    def abort(self) -> None:
        for end in (self._sender, self._receiver):
            if end is not None:
                end.abort()


class _Sending:
    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._failure = ""

    def finish(self, failure: str) -> None:
        self._failure = failure
        self._is_done.set()

    def wait(self, timeout: timedelta) -> bool:
        """Until it is handed to the kernel; raises RuntimeError."""
        if not self._is_done.wait(timeout.total_seconds()):
            raise RuntimeError("timed out waiting for room on the wire")
        if self._failure:
            raise RuntimeError(self._failure)
        return True


class _Receiving:
    def __init__(self, receiver: SecureReceiver, tag: int, data: memoryview) -> None:
        self._receiver = receiver
        self.tag = tag
        self.data = data
        self.is_done = False

    def has_come(self) -> bool:
        """Whether something of it is there; it is the oldest that was posted and not waited for."""
        return self._receiver.has_come(self)

    def wait(self, timeout: timedelta) -> bool:
        """Until it is there; raises RuntimeError."""
        self._receiver.read_until(self, time.monotonic() + timeout.total_seconds())
        return True


def _bytes_of(tensor: Tensor) -> memoryview:
    data: Any = tensor.detach().view(-1).view(torch.uint8).numpy()  # numpy has no bfloat16
    return memoryview(data)
