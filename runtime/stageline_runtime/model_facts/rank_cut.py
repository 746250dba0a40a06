"""What one rank of a stage holds: its part of every layer (tensor parallelism), or its experts (expert parallelism).

Of `ranks` that share every layer each has whole heads: `num_heads / ranks` query heads with the `num_kv_heads / ranks`
key and value heads that these attend to, and as many columns of the feed-forward block. The file of a family says how
each tensor of its layers is cut. The embedding is on every rank; the head is cut by vocabulary, in parts of
`ceil(vocab_size / ranks)` rows, of which the last may be smaller.

Of `expert_ranks`, rank `r` has the experts from `r n / E` up to `(r + 1) n / E` of a layer's `n`, and all else whole.
It runs tokens of its own through that, and its experts see the tokens of all ranks.

What doesn't divide is refused, and nothing is repeated on several ranks to make it fit. Pure: no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from stageline_runtime.model_facts.families.registry import layer_of
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.layer import Cut, Tensor
from stageline_runtime.model_facts.model_fields import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """Indices `start` to `stop`, exclusive, of dimension `dim` of a stored tensor."""

    dim: int
    start: int
    stop: int

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCut:
    """The part of a model that a rank holds; at most one of `ranks` and `expert_ranks` is several."""

    whole: ModelConfig
    rank: int = 0
    ranks: int = 1
    """That share every layer."""
    expert_rank: int = 0
    expert_ranks: int = 1
    """That share the experts alone."""

    @property
    def part(self) -> ModelConfig:
        """The config of a model whose layers are this rank's: its heads and columns. Vocabulary and ends stay whole, as
        does the number of experts that a router picks among."""
        return part_of_layers(self.whole, self.ranks)

    @property
    def vocabulary(self) -> TensorSlice:
        """This rank's rows of the head: the token ids that it gives logits of."""
        width = head_rows(self.whole.vocab_size, self.ranks)
        start = self.rank * width
        return TensorSlice(dim=0, start=start, stop=min(start + width, self.whole.vocab_size))

    @property
    def experts(self) -> range:
        """The experts that it holds in each layer that has some; none in a model without."""
        count = 0 if self.whole.mixture is None else self.whole.mixture.num_experts // self.expert_ranks
        return range(self.expert_rank * count, (self.expert_rank + 1) * count)

    def held(self, tensors: Iterable[Tensor]) -> dict[str, TensorSlice | None]:
        """By name, which part of each tensor the rank reads, None for all of it; without those that it doesn't read."""
        return {tensor.name: self._slice_of(tensor) for tensor in tensors if self._holds(tensor)}

    def num_elements(self, tensors: Iterable[Tensor]) -> int:
        """What the rank reads of them."""
        whole = {tensor.name: tensor for tensor in tensors}
        parts = self.held(whole.values()).items()
        return sum(
            prod(whole[name].shape if part is None else part.shape_of(whole[name].shape)) for name, part in parts
        )

    def _holds(self, tensor: Tensor) -> bool:
        if tensor.expert is not None:
            return tensor.expert in self.experts
        return self.rank == 0 or tensor.cut is not Cut.FIRST_RANK

    def _slice_of(self, tensor: Tensor) -> TensorSlice | None:
        if tensor.cut is Cut.BY_EXPERTS:
            stacked = tensor.expert is None and self.expert_ranks > 1
            return TensorSlice(dim=0, start=self.experts.start, stop=self.experts.stop) if stacked else None
        if self.ranks == 1:
            return None
        match tensor.cut:
            case Cut.BY_OUTPUTS:
                return self._share(0, tensor.shape)
            case Cut.BY_INPUTS:
                return self._share(1, tensor.shape)
            case Cut.BY_VOCABULARY:
                return self.vocabulary
            case _:
                return None

    def _share(self, dim: int, shape: tuple[int, ...]) -> TensorSlice:
        share = shape[dim] // self.ranks
        return TensorSlice(dim=dim, start=self.rank * share, stop=(self.rank + 1) * share)


def rank_cut(config: ModelConfig, rank: int, ranks: int) -> RankCut:
    """The part of rank `rank` of those that share every layer.

    Raises:
        UnsupportedModelError: the model can't be cut over `ranks` ranks.
        ValueError: there is no such rank.
    """
    _check_rank(rank, ranks)
    refuse_ranks(config, ranks)
    return RankCut(whole=config, rank=rank, ranks=ranks)


def expert_cut(config: ModelConfig, rank: int, ranks: int) -> RankCut:
    """The part of rank `rank` of those that share the experts alone; raises as `rank_cut`."""
    _check_rank(rank, ranks)
    refuse_experts(config, ranks)
    return RankCut(whole=config, expert_rank=rank, expert_ranks=ranks)


def _check_rank(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")


def refuse_ranks(config: ModelConfig, ranks: int) -> None:
    """Check that the model can be cut over `ranks` ranks.

    Raises:
        UnsupportedModelError: it can't; the message names the number that doesn't divide, and by what.
    """
    if ranks == 1:
        return
    if config.is_covered:
        raise UnsupportedModelError(
            f"model_type {config.architecture!r} runs through Hugging Face's layers, which can't be cut over "
            f"{ranks} ranks"
        )
    if config.mixture is not None:
        raise UnsupportedModelError(
            f"model_type {config.architecture!r} is a mixture of experts, whose layers are not cut over {ranks} ranks "
            "by tensor parallelism"
        )
    for tensor in layer_of(config, 0).tensors():
        if tensor.cut is Cut.INDIVISIBLE:
            raise UnsupportedModelError(
                f"model_type {config.architecture!r} can't be cut over {ranks} ranks: every rank would need all of "
                f"what {tensor.name} is computed from"
            )
    sizes = {
        "query heads": config.num_heads,
        "key and value heads": config.num_kv_heads,
        "feed-forward columns": config.intermediate_size,
        "hidden elements": config.hidden_size,  # of which a rank sends its share to the next stage
    }
    wrong = [f"{size} {name}" for name, size in sizes.items() if size % ranks]
    if wrong:
        raise UnsupportedModelError(f"the model's {' and '.join(wrong)} can't be divided among {ranks} ranks")
    if head_rows(config.vocab_size, ranks) * (ranks - 1) >= config.vocab_size:
        raise UnsupportedModelError(f"a vocabulary of {config.vocab_size} leaves the last of {ranks} ranks no token")


def refuse_experts(config: ModelConfig, ranks: int) -> None:
    """Check that the experts of the model can be cut over `ranks` ranks; raises as `refuse_ranks`."""
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


def part_of_layers(config: ModelConfig, ranks: int) -> ModelConfig:
    """The config of one rank's share of every layer, the same for all ranks; `refuse_ranks` must have passed it."""
    if ranks == 1:
        return config
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=config.num_kv_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
    )


def head_rows(vocab_size: int, ranks: int) -> int:
    """Rows of the head on a rank, at most; the ranks have them in their order."""
    return -(-vocab_size // ranks)
