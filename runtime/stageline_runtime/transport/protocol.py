"""What the stage's runner needs of a transport, and the transport of a pipeline with a single stage.

Every call is a pure function of a plan: both ends derive shape and order from it, so no metadata crosses with a tensor.
Receives may be posted before they are needed; sends return once the tensor is queued and wait only when the ring of
outstanding sends is full.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stageline_runtime.planning.memory import FEEDBACK_WIDTH as FEEDBACK_WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSizes:
    """What crosses between stages in one plan, at most."""

    hidden_size: int
    dtype: torch.dtype
    """Of hidden tensors `[num_tokens, hidden_size]`."""
    max_step_tokens: int
    max_rows: int
    """Of feedback."""


class PeerLostError(Exception):
    """A neighbour is gone or did not answer in time."""

    def __init__(
        self, peer: int, operation: str, detail: str, *, seq: int | None = None, timed_out: bool = False
    ) -> None:
        plan = "" if seq is None else f"plan {seq}: "
        how = "did not answer" if timed_out else "was lost"
        super().__init__(f"{plan}stage {peer} {how} during {operation}: {detail}")
        self.seq = seq
        self.peer = peer
        self.operation = operation
        self.timed_out = timed_out


class Transport(Protocol):
    """Hidden tensors downstream, feedback from the last stage to the first. It ends with the process."""

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        """Be ready for plan `seq`'s hidden tensor from the stage before."""

    def hidden_has_come(self, seq: int) -> bool:
        """Whether `wait_hidden` would return without waiting for plan `seq`, the next one: the start of its tensor has
        arrived or the peer is gone. Also True if the transport can't check without waiting."""

    def wait_hidden(self, seq: int) -> Tensor:
        """The hidden tensor `[num_tokens, hidden_size]` of plan `seq`; raises PeerLostError."""

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Send `[num_tokens, hidden_size]` to the stage after; raises PeerLostError."""

    def would_block(self) -> bool:
        """Whether the next `send_hidden` has to wait for an earlier one."""

    def check(self, seq: int) -> None:
        """While plan `seq` is on a device; never waits, raises PeerLostError. A receive from a lost peer never ends."""

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """First stage: be ready for plan `seq`'s sampled rows."""

    def wait_feedback(self, seq: int) -> Tensor:
        """First stage: sampled rows `[num_rows, FEEDBACK_WIDTH]` int64 of plan `seq`; raises PeerLostError."""

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        """Last stage: send sampled rows `[num_rows, FEEDBACK_WIDTH]` to the first stage; raises PeerLostError."""


class LoopbackTransport:
    """First stage and last stage are one: feedback comes back to it, hidden tensors never leave it."""

    def __init__(self) -> None:
        self._feedback: dict[int, Tensor] = {}

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        raise AssertionError(f"plan {seq}: a single stage receives no hidden tensor of {num_tokens} tokens")

    def hidden_has_come(self, seq: int) -> bool:
        raise AssertionError(f"plan {seq}: a single stage receives no hidden tensor")

    def wait_hidden(self, seq: int) -> Tensor:
        raise AssertionError(f"plan {seq}: a single stage receives no hidden tensor")

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        raise AssertionError(f"plan {seq}: a single stage sends no hidden tensor of shape {tuple(hidden.shape)}")

    def would_block(self) -> bool:
        return False

    def check(self, seq: int) -> None:
        """There is no peer to lose."""

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """Feedback is kept by `send_feedback`; there is nothing to post."""

    def wait_feedback(self, seq: int) -> Tensor:
        return self._feedback.pop(seq)

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        self._feedback[seq] = rows
