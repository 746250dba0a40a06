"""The two sums over ranks in a layer: of what attention's output projection gives, and of the feed-forward block's."""

from dataclasses import dataclass

from torch import Tensor

from stageline_runtime.ranks.protocol import RankGroup


@dataclass(frozen=True, slots=True)
class LayerSums:
    """`layer` counts from the model's first, and is only for the names that the watchdog gets."""

    ranks: RankGroup
    layer: int

    def attention(self, rows: Tensor) -> Tensor:
        """The sum of all ranks' `[padded_tokens, hidden_size]`, which takes its place."""
        return self.ranks.all_reduce(rows, f"all-reduce, layer {self.layer}, attention")

    def feed_forward(self, rows: Tensor) -> Tensor:
        """The same, of the feed-forward block."""
        return self.ranks.all_reduce(rows, f"all-reduce, layer {self.layer}, feed-forward")


def layer_sums(ranks: RankGroup, layer: int) -> LayerSums | None:
    """None for a single rank: its layers then run as if there were no ranks."""
    return None if ranks.size == 1 else LayerSums(ranks, layer)
