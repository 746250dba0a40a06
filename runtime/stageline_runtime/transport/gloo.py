"""The gloo transport: point-to-point over TCP, `Work` handles in place of events.

Two process groups, one for hidden tensors and one for feedback, so that neither waits behind the other. Receives are
posted as soon as their plan is known: a gloo send completes only once its receive is posted. Waits use `Work.wait`;
polling `is_completed` would starve gloo's own thread.
"""

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, PeerLostError

SEND_RING = 4
"""Outstanding hidden sends before a send waits for the oldest."""


class Work(Protocol):
    """torch's handle of one operation under way."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until done; raises RuntimeError on a lost peer or when the time is up."""
        ...

    def is_completed(self) -> bool:
        """Whether it is done."""
        ...


class PointToPointGroup(Protocol):
    """The part of `torch.distributed.ProcessGroupGloo` used here (torch's stubs leave it out)."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Begin to send."""
        ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Begin to receive."""
        ...

    def abort(self) -> None:
        """Give up everything outstanding."""
        ...


class GlooTransport:
    """One stage's connections to its neighbours."""

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
    ) -> None:
        self._hidden_group = hidden_group
        self._feedback_group = feedback_group
        self._stage = stage
        self._last = stage_count - 1
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._timeout = timedelta(seconds=step_timeout_seconds)
        self._hidden_posted: dict[int, tuple[Tensor, Work]] = {}
        self._feedback_posted: dict[int, tuple[Tensor, Work]] = {}
        self._hidden_sends: deque[tuple[Work, Tensor]] = deque()
        self._feedback_sends: deque[tuple[Work, Tensor]] = deque()

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        """Post the receive of plan `seq`'s hidden tensor."""
        buffer = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype)
        peer = self._stage - 1
        work = self._begin(peer, "post receive", lambda: self._hidden_group.recv([buffer], peer, seq))
        self._hidden_posted[seq] = (buffer, work)

    def wait_hidden(self, seq: int) -> Tensor:
        """The hidden tensor `[num_tokens, hidden_size]` of plan `seq`."""
        buffer, work = self._hidden_posted.pop(seq)
        self._finish(self._stage - 1, "receive hidden", work)
        return buffer

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Queue `[num_tokens, hidden_size]` for the next stage; waits while `SEND_RING` sends are outstanding."""
        peer = self._stage + 1
        while len(self._hidden_sends) >= SEND_RING:
            work, _ = self._hidden_sends.popleft()
            self._finish(peer, "send hidden", work)
        tensor = hidden.contiguous()
        work = self._begin(peer, "send hidden", lambda: self._hidden_group.send([tensor], peer, seq))
        self._hidden_sends.append((work, tensor))

    def would_block(self) -> bool:
        """Whether the next `send_hidden` has to wait for an earlier one."""
        return len(self._hidden_sends) >= SEND_RING

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """Post the receive of plan `seq`'s sampled rows."""
        buffer = torch.empty(num_rows, FEEDBACK_WIDTH, dtype=torch.int64)
        work = self._begin(self._last, "post feedback", lambda: self._feedback_group.recv([buffer], self._last, seq))
        self._feedback_posted[seq] = (buffer, work)

    def wait_feedback(self, seq: int) -> Tensor:
        """Sampled rows `[num_rows, FEEDBACK_WIDTH]` of plan `seq`."""
        buffer, work = self._feedback_posted.pop(seq)
        self._finish(self._last, "receive feedback", work)
        return buffer

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        """Queue sampled rows for the first stage; never waits for the newest ones."""
        # The first stage takes feedback only when a later plan needs it, so sends stay outstanding for as long as
        # their requests idle; buffers live until then. Completed ones are collected from the front.
        while self._feedback_sends and self._feedback_sends[0][0].is_completed():
            self._feedback_sends.popleft()
        work = self._begin(0, "send feedback", lambda: self._feedback_group.send([rows], 0, seq))
        self._feedback_sends.append((work, rows))

    def close(self) -> None:
        """Let go of the process groups; outstanding operations fail."""
        for group in (self._hidden_group, self._feedback_group):
            group.abort()

    def _begin(self, peer: int, operation: str, action: Callable[[], Work]) -> Work:
        try:
            return action()
        except RuntimeError as error:
            raise _lost(peer, operation, error) from error

    def _finish(self, peer: int, operation: str, work: Work) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise _lost(peer, operation, error) from error


def _lost(peer: int, operation: str, error: RuntimeError) -> PeerLostError:
    first_line = str(error).splitlines()[0]
    return PeerLostError(peer, operation, first_line, timed_out="timed out" in first_line.lower())
