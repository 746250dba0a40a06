"""The transport of a pipeline with one stage: feedback comes back to the stage that sent it, nothing else crosses."""

from torch import Tensor


class LoopbackTransport:
    """First stage and last stage are one; hidden tensors never leave it."""

    def __init__(self) -> None:
        self._feedback: dict[int, Tensor] = {}

    def post_hidden(self, seq: int, num_tokens: int) -> None:
        """No stage comes before this one."""
        raise AssertionError(f"plan {seq}: a single stage receives no hidden tensor of {num_tokens} tokens")

    def wait_hidden(self, seq: int) -> Tensor:
        """No stage comes before this one."""
        raise AssertionError(f"plan {seq}: a single stage receives no hidden tensor")

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """No stage comes after this one."""
        raise AssertionError(f"plan {seq}: a single stage sends no hidden tensor of shape {tuple(hidden.shape)}")

    def would_block(self) -> bool:
        """Nothing is ever sent."""
        return False

    def post_feedback(self, seq: int, num_rows: int) -> None:
        """Feedback is kept by `send_feedback`; there is nothing to post."""

    def wait_feedback(self, seq: int) -> Tensor:
        """The rows kept for plan `seq`."""
        return self._feedback.pop(seq)

    def send_feedback(self, seq: int, rows: Tensor) -> None:
        """Keep the rows for a later plan of this stage."""
        self._feedback[seq] = rows

    def close(self) -> None:
        """Nothing to let go of."""
