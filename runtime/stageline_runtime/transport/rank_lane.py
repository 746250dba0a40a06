"""The transport of one rank of a stage that has several: its part of each hidden tensor crosses, the whole is gathered.

Rank r of a stage talks to rank r of its neighbours alone, so a stage's link carries the same bytes whatever its ranks.
A part is `hidden_size / ranks` columns; after a receive the ranks of the stage gather the whole from their parts.
Sampled rows cross whole on every lane, so that each rank of the first stage learns them.
"""

from torch import Tensor

from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.transport.protocol import Transport

GATHER_HIDDEN = "all-gather, hidden"


class RankLane:
    """A `Transport`; `inner` is this rank's lane, for hidden tensors of `hidden_size / ranks.size` columns."""

    def __init__(self, inner: Transport, ranks: RankGroup) -> None:
        self._inner = inner
        self._ranks = ranks
        self.post_hidden = inner.post_hidden
        self.hidden_has_come = inner.hidden_has_come
        self.would_block = inner.would_block
        self.check = inner.check
        self.post_feedback = inner.post_feedback
        self.wait_feedback = inner.wait_feedback
        self.send_feedback = inner.send_feedback
        self.close = inner.close

    def wait_hidden(self, seq: int) -> Tensor:
        """The whole `[num_tokens, hidden_size]` of plan `seq`, once every rank has its part; raises PeerLostError."""
        parts = self._ranks.all_gather(self._inner.wait_hidden(seq), GATHER_HIDDEN)
        return parts.movedim(0, 1).flatten(1)

    def send_hidden(self, seq: int, hidden: Tensor) -> None:
        """Send this rank's columns of `[num_tokens, hidden_size]`, which all ranks hold; raises PeerLostError."""
        width = hidden.shape[1] // self._ranks.size
        self._inner.send_hidden(seq, hidden[:, self._ranks.rank * width : (self._ranks.rank + 1) * width])
