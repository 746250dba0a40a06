"""The NCCL transport: tensors cross from device to device, waits are waits of streams, never of the host.

Each link is a communicator of two ranks with a stream of its own: hidden tensors from one stage to the next, feedback
from the last to the first, so that none queues behind another. An unmatched receive occupies part of the device, so a
hidden tensor's is posted one plan ahead and a feedback's once its plan's hidden tensor is sent. Buffers are rings made
at load: one is written again only after the events of its send, or of its last reader, which streams wait for.

The order of waits is tested on simulated streams, NCCL itself by `make gpu-check` (docs/dev/gpu-check.md).
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError

from stageline_runtime.accelerator.nccl import group_error
from stageline_runtime.accelerator.protocol import Accelerator, Event, Stream
from stageline_runtime.planning.memory import FEEDBACK_RING, HIDDEN_RING
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError, WireSizes

RECEIVE_AHEAD = 1
"""Hidden tensors received while the plan before them runs."""


class NcclLink:
    """One end of a communicator; `peer` is the other end's rank, 0 upstream and 1 downstream.

    Both operations queue work on the active stream and return; they raise torch's DistError where NCCL refuses.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor], self._peer, 0).wait()  # waits on the active stream, not on the host

    def receive(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._peer, 0).wait()

    def error(self) -> str | None:
        """Whether NCCL has reported an error of an operation."""
        return group_error(self._group)


class NcclTransport:
    """One stage's links: `before` and `after` carry hidden tensors, `feedback` joins the last stage and the first."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        before: NcclLink | None,
        after: NcclLink | None,
        feedback: NcclLink | None,
        stage: int,
        stage_count: int,
        sizes: WireSizes,
    ) -> None:
        def channel(link: NcclLink | None, operation: str, peer: int) -> "_Channel | None":
            return None if link is None else _Channel(accelerator, link, operation, peer, sizes)

        self._before = channel(before, "receive hidden", stage - 1)
        self._after = channel(after, "send hidden", stage + 1)
        returned = ("receive feedback", stage_count - 1) if stage == 0 else ("send feedback", 0)
        self._feedback = channel(feedback, *returned)

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        """Note that plan `seq`'s hidden tensor will come; it is posted when its turn is near."""
        assert self._before is not None, "the first stage receives no hidden tensor"
        self._before.expected.append((seq, num_tokens))

    def hidden_has_come(self, seq: int) -> bool:  # noqa: ARG002 - the protocol's
        """The host never waits for it: the device does."""
        return True

    def wait_hidden(self, seq: int) -> Tensor:
        """The hidden tensor `[num_tokens, hidden_size]` of plan `seq`, valid for work queued until the next call."""
        assert self._before is not None, "the first stage receives no hidden tensor"
        self._before.check(seq)
        self._before.release_read()
        self._before.post(RECEIVE_AHEAD + 1)
        return self._before.await_oldest(seq)

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Queue `[num_tokens, hidden_size]` for the next stage."""
        assert self._after is not None, "the last stage sends no hidden tensor"
        self._after.send(seq, hidden)
        if self._feedback is not None:
            self._feedback.post(FEEDBACK_RING - 1, through=seq)

    def would_block(self) -> bool:
        """Whether the device, not the host, would wait: the oldest buffer's send isn't done."""
        return self._after is not None and self._after.is_full()

    def check(self, seq: int) -> None:
        """Raise PeerLostError if a link has failed: outstanding operations on that link never end."""
        for channel in (self._before, self._after, self._feedback):
            if channel is not None:
                channel.check(seq)

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """Note that plan `seq`'s rows will come; the receive is posted once the plan's hidden tensor is sent."""
        assert self._feedback is not None, "a middle stage receives no feedback"
        self._feedback.expected.append((seq, num_rows))

    def wait_feedback(self, seq: int) -> Tensor:
        """Sampled rows `[num_rows, FEEDBACK_WIDTH]` of plan `seq`, valid for work queued until the next call."""
        assert self._feedback is not None, "a middle stage receives no feedback"
        self._feedback.check(seq)
        self._feedback.release_read()
        self._feedback.post(FEEDBACK_RING - 1, through=seq)  # as far as the ring holds them beside the one in use
        return self._feedback.await_oldest(seq)

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        assert self._feedback is not None, "a middle stage sends no feedback"
        self._feedback.send(seq, rows)


class _Channel:
    """One direction of one link: its stream, its ring of buffers, and the event after which each may be written.

    `operation` is what it does for this stage, with stage `peer`.
    """

    def __init__(self, accelerator: Accelerator, link: NcclLink, operation: str, peer: int, sizes: WireSizes) -> None:
        self._accelerator = accelerator
        self._link = link
        self._operation = operation
        self._peer = peer
        hidden = operation.endswith("hidden")
        shape = (sizes.max_step_tokens, sizes.hidden_size) if hidden else (sizes.max_rows, FEEDBACK_WIDTH)
        size, dtype = (HIDDEN_RING, sizes.dtype) if hidden else (FEEDBACK_RING, torch.int64)
        self._stream: Stream = accelerator.side_stream()
        self._buffers = [torch.zeros(shape, dtype=dtype, device=accelerator.device) for _ in range(size)]
        self._free: list[Event | None] = [None] * size
        self._next = 0
        self.expected: deque[tuple[int, int]] = deque()
        """Receives not posted yet: plan and number of rows."""
        self._posted: deque[tuple[int, Tensor, Event]] = deque()
        self._reading: deque[int] = deque()
        self._is_handed_out = False

    def check(self, seq: int) -> None:
        """Raise PeerLostError where NCCL has reported an error."""
        if (error := self._link.error()) is not None:
            raise PeerLostError(self._peer, self._operation, error, seq=seq)

    def send(self, seq: int, tensor: Tensor) -> None:
        """Copy behind the compute that made `tensor`, then send from the copy, beside later compute."""
        self.check(seq)
        place = self._turn()
        main = self._accelerator.main
        if (sent := self._free[place]) is not None:
            main.wait_for(sent)
        buffer = self._buffers[place][: len(tensor)]
        self._accelerator.copy(buffer, tensor)
        self._stream.wait_for(main.record())
        self._free[place] = self._queue(seq, self._link.send, buffer)

    def post(self, most: int, through: int | None = None) -> None:
        """Post receives, of plans up to `through`, until `most` are posted; each waits for its buffer's last reader."""
        while self.expected and len(self._posted) < most:
            seq, num_rows = self.expected[0]
            if through is not None and seq > through:
                return
            self.expected.popleft()
            place = self._turn()
            if (read := self._free[place]) is not None:
                self._stream.wait_for(read)
            buffer = self._buffers[place][:num_rows]
            self._posted.append((seq, buffer, self._queue(seq, self._link.receive, buffer)))
            self._reading.append(place)

    def await_oldest(self, seq: int) -> Tensor:
        """What was received for plan `seq`, which must be the oldest; the device waits for it."""
        received, tensor, event = self._posted.popleft()
        assert received == seq, f"plan {seq}'s turn to {self._operation}, but the next is plan {received}'s"
        self._accelerator.main.wait_for(event)
        return tensor

    def release_read(self) -> None:
        """All that reads the oldest received tensor is queued: its buffer is free behind that."""
        if self._reading and self._is_handed_out:
            self._free[self._reading.popleft()] = self._accelerator.main.record()
        self._is_handed_out = True

    def is_full(self) -> bool:
        """Whether the next send's buffer is still being sent."""
        oldest = self._free[self._next]
        return oldest is not None and not oldest.is_done()

    def _queue(self, seq: int, operation: Callable[[Tensor], None], rows: Tensor) -> Event:
        """Behind what the stream has to do; the event is the operation's end. Raises PeerLostError."""
        try:
            with self._stream.active():
                operation(rows)
        except DistError as error:
            raise PeerLostError(self._peer, self._operation, str(error).splitlines()[0], seq=seq) from error
        return self._stream.record()

    def _turn(self) -> int:
        place, self._next = self._next, (self._next + 1) % len(self._buffers)
        return place
