"""What one rank of a stage holds when its ranks share every layer: tensor parallelism, described without torch.

A rank has whole heads: `num_heads / ranks` query heads with the `num_kv_heads / ranks` key and value heads that these
attend to, and as many columns of the feed-forward block. Query, key, value, gate and up are cut by their outputs, and
output and down by their inputs, so that the sum over all ranks of what the two latter give is what one rank would give.
Their biases belong to rank 0, which adds each once. Norms and the embedding are on every rank; the head is cut by
vocabulary, in parts of `ceil(vocab_size / ranks)` rows, of which the last may be smaller.

What doesn't divide is refused, and nothing is repeated on several ranks to make it fit.
"""

from dataclasses import dataclass, replace

from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError

_BY_OUTPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_BY_INPUTS = ("self_attn.o_proj", "mlp.down_proj")


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
    """The part of a model that rank `rank` of `ranks` holds in its stage's layers and in the head."""

    whole: ModelConfig
    rank: int
    ranks: int

    @property
    def part(self) -> ModelConfig:
        """The config of a model whose layers are this rank's: its heads and columns. Vocabulary and ends stay whole."""
        return part_of_layers(self.whole, self.ranks)

    @property
    def vocabulary_width(self) -> int:
        """Rows of the head on every rank but the last, which may have fewer."""
        return head_rows(self.whole.vocab_size, self.ranks)

    @property
    def vocabulary(self) -> TensorSlice:
        """This rank's rows of the head: the token ids that it gives logits of."""
        start = self.rank * self.vocabulary_width
        return TensorSlice(dim=0, start=start, stop=min(start + self.vocabulary_width, self.whole.vocab_size))

    def holds(self, name: str) -> bool:
        """Whether it reads any of a layer's tensor; `name` is the one within the layer."""
        return self.rank == 0 or not name.endswith(".bias") or name.removesuffix(".bias") not in _BY_INPUTS

    def slice_of(self, name: str, shape: tuple[int, ...]) -> TensorSlice | None:
        """Which part of a layer's tensor of whole `shape` it reads; None: all of it."""
        module, _, kind = name.rpartition(".")
        if self.ranks == 1:
            return None
        if module in _BY_OUTPUTS:
            return self._share(0, shape[0])
        if module in _BY_INPUTS and kind == "weight":
            return self._share(1, shape[1])
        return None

    def _share(self, dim: int, size: int) -> TensorSlice:
        share = size // self.ranks
        return TensorSlice(dim=dim, start=self.rank * share, stop=(self.rank + 1) * share)


def rank_cut(config: ModelConfig, rank: int, ranks: int) -> RankCut:
    """The part of rank `rank`.

    Raises:
        UnsupportedModelError: the model can't be cut over `ranks` ranks.
        ValueError: there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    refuse_ranks(config, ranks)
    return RankCut(whole=config, rank=rank, ranks=ranks)


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
