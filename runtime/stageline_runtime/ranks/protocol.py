"""Collectives between the ranks of one stage while they run a plan; their shapes follow from the plan alone.

Every rank calls the same operations with the same shapes in the same order, because all of them run the same plans and
none decides anything alone. On CPUs sums are made in the order of the ranks, in float32 for narrower types, and every
rank gets the same bits; on devices they are the communicator's. A call returns when the result is ready, on a device
for work queued behind it. The supervisor notices the end of another rank. The watchdog gets each operation by name and
notices a delay.
"""

from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """The ranks of one stage, as one of them sees them. Each has its own; only one thread of a rank calls it."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks the stage has."""

    def all_reduce(self, rows: Tensor, operation: str, /) -> Tensor:
        """The sum over all ranks of `rows`, of any shape; may be written in place of `rows`, which must not be used
        afterwards. `operation` names it for the watchdog, as in "all-reduce, layer 7".
        """

    def all_gather(self, rows: Tensor, operation: str, /) -> Tensor:
        """`[size, *rows.shape]`: what each rank gave, in the order of the ranks."""

    def reduce_scatter(self, rows: Tensor, operation: str, /) -> Tensor:
        """This rank's part of the sum over all ranks of `rows` `[size, ...]`: the sum of all `rows[rank]`."""

    def close(self) -> None:
        """Let go of what the ranks share."""


class LoneRank:
    """A stage of a single rank: every exchange is with itself."""

    rank = 0
    size = 1

    def all_reduce(self, rows: Tensor, _operation: str, /) -> Tensor:
        return rows

    def all_gather(self, rows: Tensor, _operation: str, /) -> Tensor:
        return rows.unsqueeze(0)

    def reduce_scatter(self, rows: Tensor, _operation: str, /) -> Tensor:
        return rows[0]

    def close(self) -> None:
        pass
