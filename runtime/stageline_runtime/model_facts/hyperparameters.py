"""The hyper-parameters of a decoder-only model, whoever computes it. Pure: no torch."""

from dataclasses import dataclass
from typing import Any

from stageline_runtime.model_facts.model_coverage import MeasuredParameters

Windows = tuple[int | None, ...]
"""By layer: how many positions a query sees, itself included; None: all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """Mixture-of-experts feed-forward blocks: a router picks some experts for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Inner size of one expert."""
    normalise_weights: bool
    """Whether the picked experts' weights are scaled to sum to one."""
    sparse_layers: tuple[bool, ...]
    """By layer: whether its feed-forward block is a mixture; the others are dense."""
    shared_size: int | None = None
    """Inner size of one more expert, which every token passes, weighted by a gate of its own; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Hyper-parameters of a decoder. Sizes are element counts."""

    architecture: str
    """Hugging Face `model_type`."""
    hidden_size: int
    intermediate_size: int
    """Of the dense feed-forward blocks."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    tie_word_embeddings: bool
    dtype: str
    """What `auto` means for this model: `float32` or `bfloat16`, and `float16` where another engine computes."""
    eos_token_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    """Whether the query, key and value projections have biases."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    attention_windows: Windows = ()
    """Of the own decoder's layers."""
    mixture: MixtureConfig | None = None
    """Set where feed-forward blocks are mixtures of experts."""
    is_covered: bool = False
    """Whether Hugging Face's layers run it, which read the config themselves: what shapes a layer's inside (biases,
    norms, rotary embedding, windows, mixtures) has its default here and means nothing."""
    measured: MeasuredParameters | None = None
    """Of a covered model whose checkpoint is here: its weights, as the file headers have them."""

    def kv_bytes_per_token(self, num_layers: int, element_bytes: int) -> int:
        """Bytes of keys and values that one token takes in `num_layers` layers."""
        return 2 * num_layers * self.num_kv_heads * self.head_dim * element_bytes
