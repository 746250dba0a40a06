"""What one rank of a stage holds when its ranks share the experts of a mixture, described without torch.

Of `n` experts of a layer, rank `r` of `E` holds those from `r n / E` up to `(r + 1) n / E`. All else is whole on every
rank: attention, norms, router, shared expert, dense layers, embedding and head. Each rank runs tokens of its own
through these, and its experts see the tokens of all ranks.

Experts that don't divide are refused, as is a model without any: none is repeated on several ranks to make it fit.
"""

import re
from dataclasses import dataclass

from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError
from stageline_runtime.model_facts.model_shapes import (
    EXPERT_DOWN_NAME,
    EXPERT_GATE_UP_NAME,
    expert_parameters,
    layer_parameters,
    mixture_of,
)
from stageline_runtime.model_facts.rank_cut import TensorSlice

_STACKED = (EXPERT_GATE_UP_NAME, EXPERT_DOWN_NAME)
_SEPARATE = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCut:
    """The part of a model that rank `rank` of `ranks` holds in its stage's layers: all but other ranks' experts."""

    whole: ModelConfig
    rank: int
    ranks: int

    @property
    def part(self) -> ModelConfig:
        """The config by which the rank computes: the model's, whose router picks among all experts."""
        return self.whole

    @property
    def vocabulary(self) -> None:
        """It has the whole head: its rows are of other tokens than another rank's."""

    @property
    def experts(self) -> range:
        """The experts that it holds in each layer that has some; none in a model without."""
        count = 0 if self.whole.mixture is None else self.whole.mixture.num_experts // self.ranks
        return range(self.rank * count, (self.rank + 1) * count)

    def holds(self, name: str) -> bool:
        """Whether it reads any of a layer's tensor; `name` is the one within the layer, of any form of checkpoint."""
        separate = _SEPARATE.search(name)
        return separate is None or int(separate[1]) in self.experts

    def slice_of(self, name: str, _shape: tuple[int, ...]) -> TensorSlice | None:
        """Which part of a layer's tensor it reads: its experts' of one that stacks them; None: all of it."""
        if self.ranks == 1 or name not in _STACKED:
            return None
        return TensorSlice(dim=0, start=self.experts.start, stop=self.experts.stop)


def expert_cut(config: ModelConfig, rank: int, ranks: int) -> ExpertCut:
    """The part of rank `rank`.

    Raises:
        UnsupportedModelError: the model's experts can't be cut over `ranks` ranks.
        ValueError: there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    refuse_experts(config, ranks)
    return ExpertCut(whole=config, rank=rank, ranks=ranks)


def refuse_experts(config: ModelConfig, ranks: int) -> None:
    """Check that the experts of the model can be cut over `ranks` ranks.

    Raises:
        UnsupportedModelError: they can't; the message names the number that doesn't divide, and by what.
    """
    if ranks == 1:
        return
    if config.is_covered:
        raise UnsupportedModelError(
            f"model_type {config.architecture!r} runs through Hugging Face's layers, whose experts can't be cut over "
            f"{ranks} ranks"
        )
    if config.mixture is None or not any(config.mixture.sparse_layers):
        raise UnsupportedModelError(
            f"model_type {config.architecture!r} has no experts in any layer that could be cut over {ranks} ranks"
        )
    if config.mixture.num_experts % ranks:
        raise UnsupportedModelError(
            f"the model's {config.mixture.num_experts} experts a layer can't be divided among {ranks} ranks"
        )


def rank_layer_parameters(config: ModelConfig, layer: int, ranks: int) -> int:
    """Elements of all tensors of a layer that one of `ranks` holds; `refuse_experts` must have passed the config."""
    held = layer_parameters(config, layer)
    if mixture := mixture_of(config, layer):
        held -= (mixture.num_experts - mixture.num_experts // ranks) * expert_parameters(config, mixture)
    return held
