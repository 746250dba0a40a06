"""The transports over sockets: one connection to the next stage and one from the previous stage.

Each stage receives one kind of tensor and sends one. The first stage sends hidden tensors and receives feedback. The
last stage receives hidden tensors and sends feedback. The other stages receive and send hidden tensors. So no receive
is posted ahead: early data stays in the kernel, in plan order. Tensors that the kernel hasn't accepted bound how far a
stage runs ahead of the next.

Device tensors are staged through pinned host memory, out and in, and cross the wire like CPU tensors. This serves
stages that share a device, where NCCL refuses, and groups that mix devices and CPUs: each end may be either. A thread
waits for the copy's event and then sends; the stage's own thread only queues. The stage's thread waits for incoming
data, since no device work can be queued before the data arrives. During that wait the device computes the previous
plan. Its sampled tokens are reported as soon as they are done, since the last stage first checks whether data arrived.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import Accelerator, Event
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, WireSizes
from stageline_runtime.transport.socket_link import SocketReceiver, SocketSender

SEND_RING: Final = 4
"""Outstanding sends before one more waits for the oldest."""
QUEUED_SENDS: Final = 4
"""Sends that wait for their copy before the next one waits for the thread."""
MAX_TAG: Final = 1 << 30
"""Far more plans than are ever in flight."""


class SocketTransport:
    """A `Transport`."""

    def __init__(
        self,
        after: SocketSender,
        before: SocketReceiver,
        *,
        stage: int,
        stage_count: int,
        step_timeout_seconds: float,
    ) -> None:
        self._after = after
        self._before = before
        self._next_stage = (stage + 1) % stage_count
        self._stage_before = (stage - 1) % stage_count
        self._timeout_seconds = step_timeout_seconds
        self._expected: deque[tuple[int, int]] = deque()
        """Plans and rows of the tensors that will come."""

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        self._expected.append((seq, num_tokens))

    def hidden_has_come(self, seq: int) -> bool:
        assert self._expected[0][0] == seq, f"plan {seq} runs, but what comes next is plan {self._expected[0][0]}'s"
        return self._before.has_come()

    def wait_hidden(self, seq: int) -> Tensor:
        return self._receive(seq, "receive hidden")

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Send `[num_tokens, hidden_size]`; waits while `SEND_RING` tensors are not with the kernel."""
        self._send(seq, hidden, "send hidden")

    def would_block(self) -> bool:
        return self._after.outstanding() >= SEND_RING

    def check(self, seq: int) -> None:
        """A receive that failed was raised where it was waited for."""

    def post_feedback(self, seq: int, num_rows: int) -> None:
        self._expected.append((seq, num_rows))

    def wait_feedback(self, seq: int) -> Tensor:
        return self._receive(seq, "receive feedback")

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        self._send(seq, rows, "send feedback")

    def _receive(self, seq: int, operation: str) -> Tensor:
        posted, rows = self._expected.popleft()
        assert posted == seq, f"plan {seq} runs, but what comes next is plan {posted}'s"
        try:
            return self._before.receive(rows, seq % MAX_TAG)
        except RuntimeError as error:
            raise _lost(error, seq, self._stage_before, operation) from error

    def _send(self, seq: int, tensor: Tensor, operation: str) -> None:
        try:
            while self._after.outstanding() >= SEND_RING:
                self._after.await_oldest(self._timeout_seconds)
            self._after.send(tensor if tensor.is_contiguous() else tensor.contiguous(), seq % MAX_TAG)
        except RuntimeError as error:
            raise _lost(error, seq, self._next_stage, operation) from error


def _lost(error: RuntimeError, seq: int, peer: int, operation: str) -> PeerLostError:
    """A connection's error as one that names the plan, the peer and the operation."""
    timed_out = "timed out" in str(error)
    return PeerLostError(peer, operation, str(error), seq=seq, timed_out=timed_out)


class StagedTransport:
    """One stage's connections, for tensors on `accelerator`; `wire` carries the host's."""

    def __init__(self, wire: SocketTransport, accelerator: Accelerator, sizes: WireSizes) -> None:
        self._wire = wire
        self._accelerator = accelerator
        self._hidden = _Ring(accelerator, (sizes.max_step_tokens, sizes.hidden_size), sizes.dtype)
        self._feedback = _Ring(accelerator, (sizes.max_rows, FEEDBACK_WIDTH), torch.int64)
        self._sends: SimpleQueue[_Send] = SimpleQueue()
        self._failure: Exception | None = None
        self.post_hidden = wire.post_hidden
        self.hidden_has_come = wire.hidden_has_come
        self.check = wire.check
        self.post_feedback = wire.post_feedback
        threading.Thread(target=self._run, name="staged sends", daemon=True).start()

    def wait_hidden(self, seq: int) -> Tensor:
        return self._accelerator.place(self._wire.wait_hidden(seq))

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        self._send(seq, hidden, self._hidden, self._wire.send_hidden)

    def would_block(self) -> bool:
        return self._hidden.free.empty()

    def wait_feedback(self, seq: int) -> Tensor:
        return self._accelerator.place(self._wire.wait_feedback(seq))

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        self._send(seq, rows, self._feedback, self._wire.send_feedback)

    def _send(self, seq: int, tensor: Tensor, ring: "_Ring", transmit: Callable[[int, Tensor], None]) -> None:
        buffer = ring.free.get()
        if self._failure is not None:
            ring.free.put(buffer)  # so that the next call doesn't wait either
            raise self._failure
        self._accelerator.copy(buffer[: len(tensor)], tensor)
        self._sends.put(_Send(seq, self._accelerator.main.record(), buffer, len(tensor), ring, transmit))

    def _run(self) -> None:
        """In the thread: send the queued tensors until the connection fails."""
        try:
            while True:
                send = self._sends.get()
                send.copied.wait()
                send.transmit(send.seq, send.buffer[: send.num_rows])
                send.ring.sent(send.buffer)
        except Exception as error:
            self._failure = error
            for ring in (self._hidden, self._feedback):
                ring.free.put(torch.empty(0))  # wakes a thread that waits for a buffer


class _Ring:
    """Pinned buffers. One is free again once the wire holds as many later ones as it keeps outstanding at all."""

    def __init__(self, accelerator: Accelerator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(QUEUED_SENDS + SEND_RING):
            self.free.put(accelerator.pinned(shape, dtype))
        self._outstanding: deque[Tensor] = deque()

    def sent(self, buffer: Tensor) -> None:
        """The wire has taken it; all but the newest `SEND_RING` that it took are done."""
        self._outstanding.append(buffer)
        if len(self._outstanding) > SEND_RING:
            self.free.put(self._outstanding.popleft())


@dataclass(frozen=True, slots=True)
class _Send:
    seq: int
    copied: Event
    buffer: Tensor
    num_rows: int
    ring: _Ring
    transmit: Callable[[int, Tensor], None]
