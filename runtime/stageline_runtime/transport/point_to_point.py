"""Hidden tensors and feedback over point-to-point groups with `Work` handles: what `gloo` and `local` have in common.

Two groups, one for hidden tensors and one for feedback, so that neither waits behind the other. Receives are posted as
soon as their plan is known: a send may complete only once its receive is posted. A send's tensor is kept, untouched,
until its handle was waited for; rings bound how many are. Waits use `Work.wait`; polling `is_completed` would starve
gloo's own thread.
"""

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError

SEND_RING = 4
"""Outstanding hidden sends before a send waits for the oldest."""
FEEDBACK_RING = 16
"""The same for feedback. Its receives are posted before their plans run, so the oldest send never waits for long."""
MAX_TAG = 1 << 30
"""Tags are 32-bit; sequence numbers are not. Far more plans than are ever in flight."""


class Work(Protocol):
    def wait(self, timeout: timedelta) -> bool:
        """Block until done; raises RuntimeError on a lost peer or when the time is up."""


@runtime_checkable
class TellingWork(Work, Protocol):
    """A receive that can be asked before it is waited for."""

    def has_come(self) -> bool:
        """Whether something of it is there, or the other end is gone; never waits."""


class PointToPointGroup(Protocol):
    """All that is asked of a group: the part of `torch.distributed.ProcessGroupGloo` used here, in torch's own form."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Begin to send."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Begin to receive."""

    def abort(self) -> None:
        """Give up everything outstanding."""


class PointToPointTransport:
    def __init__(
        self,
        hidden_group: PointToPointGroup,
        feedback_group: PointToPointGroup,
        *,
        stage: int,
        stage_count: int,
        hidden_size: int,
        dtype: torch.dtype,
        step_timeout_seconds: float,
        store: object = None,
    ) -> None:
        """`store` is what the groups met by: torch may ask it later, and keeps no Python object alive."""
        self._store = store
        self._hidden_group = hidden_group
        self._feedback_group = feedback_group
        self._stage = stage
        self._last = stage_count - 1
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._timeout = timedelta(seconds=step_timeout_seconds)
        self._hidden_posted: dict[int, tuple[Tensor, Work]] = {}
        self._feedback_posted: dict[int, tuple[Tensor, Work]] = {}
        # Each send's tensor is kept until it is done.
        self._hidden_sends: deque[tuple[int, Work, Tensor]] = deque()
        self._feedback_sends: deque[tuple[int, Work, Tensor]] = deque()

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        buffer = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype)
        work = _begin(self._hidden_group.recv, buffer, seq, self._stage - 1, "post receive")
        self._hidden_posted[seq] = (buffer, work)

    def hidden_has_come(self, seq: int) -> bool:
        """gloo doesn't tell: its receives are completed only by waiting on them."""
        work = self._hidden_posted[seq][1]
        return work.has_come() if isinstance(work, TellingWork) else True

    def wait_hidden(self, seq: int) -> Tensor:
        buffer, work = self._hidden_posted.pop(seq)
        self._wait(work, seq, self._stage - 1, "receive hidden")
        return buffer

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Queue `[num_tokens, hidden_size]` for the next stage; waits while `SEND_RING` sends are outstanding."""
        peer = self._stage + 1
        while len(self._hidden_sends) >= SEND_RING:
            oldest, work, _ = self._hidden_sends.popleft()
            self._wait(work, oldest, peer, "send hidden")
        tensor = hidden.contiguous()
        work = _begin(self._hidden_group.send, tensor, seq, peer, "send hidden")
        self._hidden_sends.append((seq, work, tensor))

    def would_block(self) -> bool:
        """Whether the next `send_hidden` looks at an earlier one first, and waits when that isn't done."""
        return len(self._hidden_sends) >= SEND_RING

    def check(self, seq: int) -> None:
        """A receive that failed was raised where it was waited for."""

    def post_feedback(self, seq: int, num_rows: int) -> None:
        buffer = torch.empty(num_rows, FEEDBACK_WIDTH, dtype=torch.int64)
        work = _begin(self._feedback_group.recv, buffer, seq, self._last, "post feedback")
        self._feedback_posted[seq] = (buffer, work)

    def wait_feedback(self, seq: int) -> Tensor:
        buffer, work = self._feedback_posted.pop(seq)
        self._wait(work, seq, self._last, "receive feedback")
        return buffer

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        """Queue sampled rows for the first stage; waits while `FEEDBACK_RING` sends are outstanding."""
        # gloo's handles become completed only by waiting on them, so a ring is the only bound there can be.
        while len(self._feedback_sends) >= FEEDBACK_RING:
            oldest, work, _ = self._feedback_sends.popleft()
            self._wait(work, oldest, 0, "send feedback")
        work = _begin(self._feedback_group.send, rows, seq, 0, "send feedback")
        self._feedback_sends.append((seq, work, rows))

    def close(self) -> None:
        for group in (self._hidden_group, self._feedback_group):
            group.abort()

    def _wait(self, work: Work, seq: int, peer: int, operation: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise lost(error, seq, peer, operation) from error


def _begin(
    begin: Callable[[list[Tensor], int, int], Work], tensor: Tensor, seq: int, peer: int, operation: str
) -> Work:
    try:
        return begin([tensor], peer, seq % MAX_TAG)
    except RuntimeError as error:
        raise lost(error, seq, peer, operation) from error


def lost(error: RuntimeError, seq: int, peer: int, operation: str) -> PeerLostError:
    """A group's error as one that names the plan, the peer and the operation."""
    first_line = str(error).splitlines()[0]
    timed_out = "timed out" in first_line.lower()
    return PeerLostError(peer, operation, first_line, seq=seq, timed_out=timed_out)
