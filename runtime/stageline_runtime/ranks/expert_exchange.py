"""The two exchanges of a mixture with experts cut over ranks: rows of all ranks in, this rank's rows back.

All ranks run plans of one padded size, so shapes follow from the plan and no rank sends its row count. Padding rows are
exchanged too, and their results are never read. An idle rank runs a dummy plan of that size, and takes part like any
other.
"""

from dataclasses import dataclass

from torch import Tensor

from stageline_runtime.ranks.protocol import RankGroup


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """`layer` counts from the model's first, and is only for the names that the watchdog gets."""

    ranks: RankGroup
    layer: int

    def gather(self, rows: Tensor) -> Tensor:
        """`[ranks * padded_tokens, hidden_size]`: each rank's `[padded_tokens, hidden_size]`, in their order."""
        return self.ranks.all_gather(rows, f"all-gather, layer {self.layer}, experts").flatten(0, 1)

    def scatter(self, partial: Tensor) -> Tensor:
        """The sum of what all ranks' experts gave for the gathered rows, of which this rank's are
        `[padded_tokens, hidden_size]`.
        """
        parts = partial.view(self.ranks.size, -1, partial.shape[-1])
        return self.ranks.reduce_scatter(parts, f"reduce-scatter, layer {self.layer}, experts")


def expert_exchange(ranks: RankGroup, layer: int) -> ExpertExchange | None:
    """None for a lone rank, which holds all experts and runs them for its own rows."""
    return None if ranks.size == 1 else ExpertExchange(ranks, layer)
