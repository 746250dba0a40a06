"""What the ranks of a stage divide among themselves: every layer, or the experts of its mixtures, but not both.

What is promised of tokens: a sum over ranks adds what each rank gives for its part, so in float32 results are those of
one rank up to the rounding of these sums, and greedy tokens are the same wherever no two logits are as close as that.
With layers cut, all ranks hold the same bits. With experts cut, each has rows of its own, and no row has a part in what
another row gives; only products of another number of rows may round otherwise, as they do within one rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError
from stageline_runtime.model_facts.rank_cut import RankCut, expert_cut, rank_cut
from stageline_runtime.ranks.expert_exchange import ExpertExchange, expert_exchange
from stageline_runtime.ranks.layer_sums import LayerSums, layer_sums
from stageline_runtime.ranks.protocol import LoneRank, RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRanks:
    """This rank's ends of both; a stage of a single rank has two lone ones."""

    tensor: RankGroup = field(default_factory=LoneRank)
    """Ranks that share every layer (`rank_cut`)."""
    experts: RankGroup = field(default_factory=LoneRank)
    """Ranks that share the experts alone (`expert_cut`)."""
    await_all: Callable[[str], None] = lambda _purpose: None
    """Wait until all ranks have reached `purpose`, once each, however long they load. For ranks on devices: an exchange
    that is queued before all ranks are ready would look like a hang."""

    @classmethod
    def of(cls, tensor: RankGroup | None, experts: RankGroup | None) -> "StageRanks":
        """None stands for a lone rank.

        Raises:
            UnsupportedModelError: both have several ranks.
        """
        ranks = cls(tensor=tensor or LoneRank(), experts=experts or LoneRank())
        if ranks.tensor.size > 1 and ranks.experts.size > 1:
            raise UnsupportedModelError(
                f"a stage can't cut its layers over {ranks.tensor.size} ranks and its experts over "
                f"{ranks.experts.size} ranks at once"
            )
        return ranks

    @property
    def of_stage(self) -> RankGroup:
        """All ranks of the stage, whatever they divide."""
        return self.experts if self.experts.size > 1 else self.tensor

    @property
    def samples(self) -> bool:
        """Whether this rank samples, where its stage is the last one: one of those that compute the same rows."""
        return self.tensor.rank == 0

    def cut(self, config: ModelConfig) -> RankCut:
        """What this rank holds of a model.

        Raises:
            UnsupportedModelError: the model can't be cut over so many ranks.
        """
        if self.experts.size > 1:
            return expert_cut(config, self.experts.rank, self.experts.size)
        return rank_cut(config, self.tensor.rank, self.tensor.size)

    def sums(self, layer: int) -> LayerSums | None:
        """The sums in a layer that its ranks share; `layer` counts from the model's first."""
        return layer_sums(self.tensor, layer)

    def exchange(self, layer: int) -> ExpertExchange | None:
        """The exchanges in a layer with experts that its ranks share, for a layer that has some."""
        return expert_exchange(self.experts, layer)
