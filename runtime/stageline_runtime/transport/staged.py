"""The staged transport: tensors of a device cross as those of CPUs do, by way of pinned host memory out and in.

For stages that share a device, where NCCL refuses, and for groups that mix devices and CPUs: on the wire it is what
CPUs have, so each end may be either. What leaves the device is sent by a thread that waits for the copy's event;
the stage's own thread only queues. What comes in is waited for by the stage's thread, since nothing can be queued on
the device before it is there; the device meanwhile has the plan before to do, and what that sampled is told as soon as
it is done, since the last stage asks first whether anything has come.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import Accelerator, Event
from stageline_runtime.transport.point_to_point import FEEDBACK_RING, SEND_RING
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, Transport, WireSizes

QUEUED_SENDS = 4
"""Sends that wait for their copy before the next one waits for the thread."""


@dataclass(frozen=True, slots=True)
class _Send:
    seq: int
    copied: Event
    buffer: Tensor
    is_feedback: bool


class StagedTransport:
    """One stage's connections, for tensors on `accelerator`; `wire` carries the host's."""

    def __init__(self, wire: Transport, accelerator: Accelerator, sizes: WireSizes) -> None:
        self._wire = wire
        self._accelerator = accelerator
        hidden = (sizes.max_step_tokens, sizes.hidden_size)
        # A buffer is free again once the wire holds as many later ones as it keeps outstanding at all.
        self._hidden = _Ring(accelerator, QUEUED_SENDS + SEND_RING, hidden, sizes.dtype, outstanding=SEND_RING)
        self._feedback = _Ring(
            accelerator,
            QUEUED_SENDS + FEEDBACK_RING,
            (sizes.max_rows, FEEDBACK_WIDTH),
            torch.int64,
            outstanding=FEEDBACK_RING,
        )
        self._queue: deque[_Send] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="staged sends", daemon=True)
        self._thread.start()

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        self._wire.post_hidden(seq, num_tokens)

    def hidden_has_come(self, seq: int) -> bool:
        return self._wire.hidden_has_come(seq)

    def wait_hidden(self, seq: int) -> Tensor:
        return self._accelerator.place(self._wire.wait_hidden(seq))

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        self._send(seq, hidden, self._hidden, is_feedback=False)

    def would_block(self) -> bool:
        return not self._hidden.has_room

    def check(self, seq: int) -> None:
        self._wire.check(seq)

    def post_feedback(self, seq: int, num_rows: int) -> None:
        self._wire.post_feedback(seq, num_rows)

    def wait_feedback(self, seq: int) -> Tensor:
        return self._accelerator.place(self._wire.wait_feedback(seq))

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        self._send(seq, rows, self._feedback, is_feedback=True)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wire.close()

    def _send(self, seq: int, tensor: Tensor, ring: "_Ring", *, is_feedback: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ring.has_room or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            buffer = ring.take()[: len(tensor)]
        self._accelerator.copy(buffer, tensor)
        copied = self._accelerator.main.record()
        with self._changed:
            self._queue.append(_Send(seq, copied, buffer, is_feedback))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                send = self._queue.popleft()
            try:
                send.copied.wait()
                transmit: Callable[[int, Tensor], None]
                transmit = self._wire.send_feedback if send.is_feedback else self._wire.send_hidden
                transmit(send.seq, send.buffer)
            except Exception as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                (self._feedback if send.is_feedback else self._hidden).sent += 1
                self._changed.notify_all()


class _Ring:
    """Pinned buffers, used in turn. Counts under the transport's lock."""

    def __init__(
        self, accelerator: Accelerator, size: int, shape: tuple[int, ...], dtype: torch.dtype, *, outstanding: int
    ) -> None:
        self._buffers = [accelerator.pinned(shape, dtype) for _ in range(size)]
        self._outstanding = outstanding
        self._taken = 0
        self.sent = 0
        """Sends that the wire has taken; all but the newest `outstanding` of them are done."""

    @property
    def has_room(self) -> bool:
        return self._taken - max(0, self.sent - self._outstanding) < len(self._buffers)

    def take(self) -> Tensor:
        buffer = self._buffers[self._taken % len(self._buffers)]
        self._taken += 1
        return buffer
