"""The NCCL transport: tensors cross from device to device, waits are waits of streams, never of the host.

Each link is a communicator of two ranks with a stream of its own: hidden tensors from one stage to the next, feedback
from the last to the first, so that none queues behind another. A receive is posted only when its plan is about to run
(hidden tensors one plan ahead), because an unmatched one occupies the device. Buffers are rings made at load: one is
written again only after the events of its send, or of its last reader, which streams wait for.

No two GPUs have run this yet (docs/gpu.md); its order of waits is tested on simulated streams.
"""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import Accelerator, Event, Stream
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, WireSizes

HIDDEN_RING = 4
FEEDBACK_RING = 8
RECEIVE_AHEAD = 1
"""Hidden tensors received while the plan before them runs."""


class Link(Protocol):
    """A communicator with one peer. Both calls queue work on the active stream and return."""

    def send(self, tensor: Tensor) -> None:
        """Queue a send."""

    def receive(self, tensor: Tensor) -> None:
        """Queue a receive into `tensor`."""

    def error(self) -> str | None:
        """What went wrong on the link, if something did."""

    def abort(self) -> None:
        """Give up everything outstanding, so that the device goes on."""


class NcclTransport:
    """One stage's links: `before` and `after` carry hidden tensors, `feedback` joins the last stage and the first."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        before: Link | None,
        after: Link | None,
        feedback: Link | None,
        stage: int,
        stage_count: int,
        sizes: WireSizes,
    ) -> None:
        self._accelerator = accelerator
        self._peer = {
            "receive hidden": stage - 1,
            "send hidden": stage + 1,
            "receive feedback": stage_count - 1,
            "send feedback": 0,
        }
        hidden, rows = (sizes.max_step_tokens, sizes.hidden_size), (sizes.max_rows, FEEDBACK_WIDTH)
        self._before = None if before is None else _Channel(accelerator, before, HIDDEN_RING, hidden, sizes.dtype)
        self._after = None if after is None else _Channel(accelerator, after, HIDDEN_RING, hidden, sizes.dtype)
        self._feedback = None if feedback is None else _Channel(accelerator, feedback, FEEDBACK_RING, rows, torch.int64)
        feedback_operation = "receive feedback" if stage == 0 else "send feedback"
        self._channels = (
            (self._before, "receive hidden"),
            (self._after, "send hidden"),
            (self._feedback, feedback_operation),
        )
        self._expected: deque[tuple[int, int]] = deque()
        """Hidden receives not posted yet: plan and number of tokens."""
        self._posted: deque[tuple[int, Tensor, Event]] = deque()
        self._feedback_rows: dict[int, int] = {}

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        """Note that plan `seq`'s hidden tensor will come; it is posted when its turn is near."""
        self._expected.append((seq, num_tokens))

    def hidden_has_come(self, seq: int) -> bool:  # noqa: ARG002 - the protocol's
        """The host never waits for it: the device does."""
        return True

    def wait_hidden(self, seq: int) -> Tensor:
        """The hidden tensor `[num_tokens, hidden_size]` of plan `seq`, good for what is queued until the next call."""
        assert self._before is not None, "the first stage receives no hidden tensor"
        self._check(self._before, seq, "receive hidden")
        self._before.release_read()
        while self._expected and len(self._posted) <= RECEIVE_AHEAD:
            expected, num_tokens = self._expected.popleft()
            self._posted.append((expected, *self._before.receive(num_tokens)))
        received, tensor, event = self._posted.popleft()
        assert received == seq, f"plan {seq} runs, but the next hidden tensor is plan {received}'s"
        self._accelerator.main.wait_for(event)
        return tensor

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Queue `[num_tokens, hidden_size]` for the next stage."""
        assert self._after is not None, "the last stage sends no hidden tensor"
        self._check(self._after, seq, "send hidden")
        self._after.send(hidden)

    def would_block(self) -> bool:
        """Whether the device, not the host, would wait: the oldest buffer's send isn't done."""
        return self._after is not None and self._after.is_full()

    def check(self, seq: int) -> None:
        """Whether what came was what was sent: torch notes an error before it gives up what is outstanding."""
        for channel, operation in self._channels:
            if channel is not None:
                self._check(channel, seq, operation)

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """Note that plan `seq`'s rows will come; the receive is posted when they are needed."""
        self._feedback_rows[seq] = num_rows

    def wait_feedback(self, seq: int) -> Tensor:
        """Sampled rows `[num_rows, FEEDBACK_WIDTH]` of plan `seq`, good for what is queued until the next call."""
        assert self._feedback is not None, "a middle stage receives no feedback"
        self._check(self._feedback, seq, "receive feedback")
        self._feedback.release_read()
        tensor, event = self._feedback.receive(self._feedback_rows.pop(seq))
        self._accelerator.main.wait_for(event)
        return tensor

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        assert self._feedback is not None, "a middle stage sends no feedback"
        self._check(self._feedback, seq, "send feedback")
        self._feedback.send(rows)

    def close(self) -> None:
        """Abort the communicators: a kernel that waits for a lost peer would never end."""
        for channel, _ in self._channels:
            if channel is not None:
                channel.link.abort()

    def _check(self, channel: "_Channel", seq: int, operation: str) -> None:
        error = channel.link.error()
        if error is not None:
            raise PeerLostError(self._peer[operation], operation, error, seq=seq)


class _Channel:
    """One direction of one link: its stream, its ring of buffers, and the event after which each may be written."""

    def __init__(
        self, accelerator: Accelerator, link: Link, size: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.link = link
        self._accelerator = accelerator
        self._stream: Stream = accelerator.side_stream()
        self._buffers = [torch.zeros(shape, dtype=dtype, device=accelerator.device) for _ in range(size)]
        self._free: list[Event | None] = [None] * size
        self._next = 0
        self._reading: deque[int] = deque()
        self._is_handed_out = False

    def send(self, tensor: Tensor) -> None:
        """Copy behind the compute that made `tensor`, then send from the copy, beside later compute."""
        place = self._turn()
        main = self._accelerator.main
        sent = self._free[place]
        if sent is not None:
            main.wait_for(sent)
        buffer = self._buffers[place][: len(tensor)]
        self._accelerator.copy(buffer, tensor)
        self._stream.wait_for(main.record())
        with self._stream.active():
            self.link.send(buffer)
        self._free[place] = self._stream.record()

    def receive(self, num_rows: int) -> tuple[Tensor, Event]:
        """Receive beside compute, once the buffer's last reader is done; the event is the tensor's being there."""
        place = self._turn()
        read = self._free[place]
        if read is not None:
            self._stream.wait_for(read)
        buffer = self._buffers[place][:num_rows]
        with self._stream.active():
            self.link.receive(buffer)
        self._reading.append(place)
        return buffer, self._stream.record()

    def release_read(self) -> None:
        """All that reads the oldest received tensor is queued: its buffer is free behind that."""
        if self._reading and self._is_handed_out:
            self._free[self._reading.popleft()] = self._accelerator.main.record()
        self._is_handed_out = True

    def is_full(self) -> bool:
        """Whether the next send's buffer is still being sent."""
        oldest = self._free[self._next]
        return oldest is not None and not oldest.is_done()

    def _turn(self) -> int:
        place, self._next = self._next, (self._next + 1) % len(self._buffers)
        return place
