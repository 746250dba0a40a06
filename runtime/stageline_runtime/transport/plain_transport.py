"""The transport of stages on CPUs: one connection to the next stage and one from the stage before.

Each stage receives one kind of tensor and sends one: the first sends hidden tensors and receives feedback, the last one
receives hidden tensors and sends feedback, the others have hidden tensors both ways. So nothing is posted ahead: what
comes early lies in the kernel, in the order of the plans.
"""

from collections import deque

from torch import Tensor

from stageline_runtime.transport.plain_link import PlainReceiver, PlainSender
from stageline_runtime.transport.point_to_point import MAX_TAG, SEND_RING, lost


class PlainTransport:
    """A `Transport`."""

    def __init__(
        self,
        after: PlainSender,
        before: PlainReceiver,
        *,
        stage: int,
        stage_count: int,
        step_timeout_seconds: float,
        store: object,
    ) -> None:
        """`store` is what the stages met by: others may still ask it when this one is through."""
        self._store = store
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

    def close(self) -> None:
        self._after.abort()
        self._before.abort()

    def _receive(self, seq: int, operation: str) -> Tensor:
        posted, rows = self._expected.popleft()
        assert posted == seq, f"plan {seq} runs, but what comes next is plan {posted}'s"
        try:
            return self._before.receive(rows, seq % MAX_TAG)
        except RuntimeError as error:
            raise lost(error, seq, self._stage_before, operation) from error

    def _send(self, seq: int, tensor: Tensor, operation: str) -> None:
        try:
            while self._after.outstanding() >= SEND_RING:
                self._after.await_oldest(self._timeout_seconds)
            self._after.send(tensor if tensor.is_contiguous() else tensor.contiguous(), seq % MAX_TAG)
        except RuntimeError as error:
            raise lost(error, seq, self._next_stage, operation) from error
