"""One decoder layer, in parts that a graph can capture: what comes before attention, attention, what comes after.

Eager and captured runs call the same methods. Only the mixture of experts can't be captured.
"""

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.cpu.feed_forward import ExpertLoop, ExpertMixture, FeedForward, RunExperts, linear
from stageline_runtime.models.cpu.kv_cache import AttentionBatch
from stageline_runtime.models.cpu.layer_attention import LayerAttention, Rotary
from stageline_runtime.models.cpu.operators import decode_attention
from stageline_runtime.models.cpu.row_modules import RmsNorm, RowOperators
from stageline_runtime.models.rotary import rotate
from stageline_runtime.models.weights.stage_weights import DenseWeights, ExpertWeights, LayerWeights
from stageline_runtime.ranks.expert_exchange import ExpertExchange
from stageline_runtime.ranks.layer_sums import LayerSums


class LayerParts:
    """What surrounds attention: both blocks' norms and projections, and their sums into the residual stream.

    Runs wherever its weights lie. With `sums`, config and weights are one rank's part of the layer, and what the output
    projection and the feed-forward block give is summed over the ranks. With an `exchange`, which a mixture alone uses,
    weights hold one rank's experts. How these run is for `run_experts` to say.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        kernels: RowOperators | None = None,
        sums: LayerSums | None = None,
        exchange: ExpertExchange | None = None,
        run_experts: RunExperts = ExpertLoop,
    ) -> None:
        self._sums = sums
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._input_norm = RmsNorm(weights.input_norm, config.rms_norm_eps, kernels)
        self._qkv = linear(weights.qkv)
        self._head_norm = _head_norm(config, weights)
        self._output = linear(weights.output)
        self._feed_forward_norm = RmsNorm(weights.feed_forward_norm, config.rms_norm_eps, kernels)
        self._feed_forward = _feed_forward(config, weights.feed_forward, kernels, exchange, run_experts)

    def before_attention(self, hidden: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated query and key heads, and value heads: `[padded_tokens, heads, head_dim]`."""
        query_key, value = self._project(hidden)
        return rotate(query_key, *rotary), value

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add the output of attention `[padded_tokens, num_heads * head_dim]` and then the feed-forward block's."""
        output = self._output(attended)
        if self._sums is not None:
            output = self._sums.attention(output)
        hidden, normed = self._feed_forward_norm.after_adding(hidden, output)
        forward = self._feed_forward(normed)
        return hidden + (forward if self._sums is None else self._sums.feed_forward(forward))

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key heads together, not rotated yet, and value heads."""
        query_key, value = self._projected(hidden)
        return query_key if self._head_norm is None else self._head_norm(query_key), value

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same before the heads' own norm, which some families have."""
        query_key_heads = self._num_heads + self._num_kv_heads
        rows = self._qkv(self._input_norm(hidden))
        heads = rows.view(rows.shape[0], query_key_heads + self._num_kv_heads, self._head_dim)
        return heads[:, :query_key_heads], heads[:, query_key_heads:]


class DecoderLayer(LayerParts):
    """The parts with attention over the CPU's cache: hidden `[padded_tokens, hidden_size]` to the same shape."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        attention: LayerAttention,
        kernels: RowOperators | None,
        sums: LayerSums | None = None,
        exchange: ExpertExchange | None = None,
    ) -> None:
        super().__init__(config, weights, kernels, sums, exchange)
        self.attention = attention
        self._attention_number = None if attention.handle is None else attention.handle.number
        self._attention_features = attention.out_features

    def __call__(self, hidden: torch.Tensor, rotary: Rotary, batch: AttentionBatch) -> torch.Tensor:
        query_key, value = self._project(hidden)
        return self.after_attention(hidden, self.attention(query_key, value, rotary, batch))

    def decode(self, hidden: torch.Tensor, rotary: Rotary, rows: torch.Tensor) -> torch.Tensor:
        """The whole layer for nothing but single-token rows; for capturing, and only with a compiled kernel."""
        assert self._attention_number is not None, "no compiled kernel"
        query_key, value = self._project(hidden)
        attended = decode_attention(query_key, value, rotary, rows, self._attention_number, self._attention_features)
        return self.after_attention(hidden, attended)


def _feed_forward(
    config: ModelConfig,
    weights: DenseWeights | ExpertWeights,
    kernels: RowOperators | None,
    exchange: ExpertExchange | None,
    run_experts: RunExperts,
) -> FeedForward | ExpertMixture:
    if isinstance(weights, DenseWeights):
        return FeedForward(weights, kernels)
    assert config.mixture is not None, "expert weights without a mixture"
    return ExpertMixture(config.mixture, weights, run_experts(weights), kernels, exchange)


def _head_norm(config: ModelConfig, weights: LayerWeights) -> RmsNorm | None:
    """One norm over query and key heads together, by a weight `[num_heads + num_kv_heads, head_dim]`."""
    if weights.query_norm is None or weights.key_norm is None:
        return None
    query = weights.query_norm.expand(config.num_heads, -1)
    key = weights.key_norm.expand(config.num_kv_heads, -1)
    return RmsNorm(torch.cat((query, key)), config.rms_norm_eps)
