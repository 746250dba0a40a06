"""One decoder layer, in parts that a graph can capture: what comes before attention, attention, what comes after.

Eager and captured runs call the same methods. Only the mixture of experts can't be captured: which experts run depends
on the tokens, so shapes do too.
"""

import torch
import torch.nn.functional as F

from stageline_runtime.model_facts.model_config import MixtureConfig, ModelConfig
from stageline_runtime.models.cpu.kv_cache import AttentionBatch
from stageline_runtime.models.cpu.layer_attention import LayerAttention, Rotary
from stageline_runtime.models.cpu.operators import decode_attention
from stageline_runtime.models.cpu.row_modules import Linear, RmsNorm
from stageline_runtime.models.rotary import rotate
from stageline_runtime.models.weights.stage_weights import DenseWeights, ExpertWeights, LayerWeights, Projection
from stageline_runtime.native.row_kernels import RowKernels
from stageline_runtime.ranks.layer_sums import LayerSums


class ExpertMixture:
    """A mixture of experts as feed-forward block: a router picks experts for each token, and only those picked run.

    `sum over picked experts of weight * down(silu(gate(x)) * up(x))`. Tokens are grouped by expert, so that an expert's
    weights are read once a step and never for an expert without tokens. Numerics follow Hugging Face's: routing weights
    are a float32 softmax over all experts, and the experts' outputs are summed in ascending order of the expert. A
    shared expert runs for all tokens and comes last, weighted by `sigmoid(shared_gate(x))`.
    """

    def __init__(self, mixture: MixtureConfig, weights: ExpertWeights, kernels: RowKernels | None) -> None:
        self._mixture = mixture
        shared = weights.shared
        self._shared = None if shared is None else (FeedForward(shared.block, kernels), Linear(shared.gate))
        self._router = Linear(weights.router)
        self._gate_up = tuple(Linear(weight) for weight in weights.gate_up)
        self._down = tuple(Linear(weight) for weight in weights.down)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        weights, experts = self._route(rows)
        picks_of_token = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self._mixture.num_experts).tolist()
        output = torch.zeros_like(rows)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            picks = order[start : start + count]
            tokens = picks // picks_of_token
            gate, up = self._gate_up[expert](rows[tokens]).chunk(2, dim=-1)
            result = self._down[expert](F.silu(gate) * up) * weights.flatten()[picks, None]
            output.index_add_(0, tokens, result.to(output.dtype))
            start += count
        if self._shared is None:
            return output
        shared_block, shared_gate = self._shared
        return output + torch.sigmoid(shared_gate(rows)) * shared_block(rows)

    def _route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert ids `[num_tokens, experts_per_token]` of each token's picked experts."""
        probabilities = F.softmax(self._router(rows), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._mixture.experts_per_token, dim=-1)
        if self._mixture.normalise_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts


class FeedForward:
    """Gated feed-forward block `[num_tokens, hidden_size]` to the same shape: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, weights: DenseWeights, kernels: RowKernels | None) -> None:
        self._gate_up = _linear(weights.gate_up)
        self._down = _linear(weights.down)
        self._kernels = kernels

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up(rows)
        if self._kernels is not None and not torch.compiler.is_compiling():
            return self._down(self._kernels.gate(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)


class LayerParts:
    """What surrounds attention: both blocks' norms and projections, and their sums into the residual stream.

    Runs wherever its weights lie. With `sums`, config and weights are one rank's part of the layer, and what the output
    projection and the feed-forward block give is summed over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        kernels: RowKernels | None = None,
        sums: LayerSums | None = None,
    ) -> None:
        self._sums = sums
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._input_norm = RmsNorm(weights.input_norm, config.rms_norm_eps, kernels)
        self._qkv = _linear(weights.qkv)
        self._head_norm = _head_norm(config, weights)
        self._output = _linear(weights.output)
        self._feed_forward_norm = RmsNorm(weights.feed_forward_norm, config.rms_norm_eps, kernels)
        self._feed_forward = _feed_forward(config, weights.feed_forward, kernels)

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
        query_key_heads = self._num_heads + self._num_kv_heads
        rows = self._qkv(self._input_norm(hidden))
        heads = rows.view(rows.shape[0], query_key_heads + self._num_kv_heads, self._head_dim)
        query_key, value = heads[:, :query_key_heads], heads[:, query_key_heads:]
        return query_key if self._head_norm is None else self._head_norm(query_key), value


class DecoderLayer(LayerParts):
    """The parts with attention over the CPU's cache: hidden `[padded_tokens, hidden_size]` to the same shape."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        attention: LayerAttention,
        kernels: RowKernels | None,
        sums: LayerSums | None = None,
    ) -> None:
        super().__init__(config, weights, kernels, sums)
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


def _linear(projection: Projection) -> Linear:
    return Linear(projection.weight, projection.bias)


def _feed_forward(
    config: ModelConfig, weights: DenseWeights | ExpertWeights, kernels: RowKernels | None
) -> FeedForward | ExpertMixture:
    if isinstance(weights, DenseWeights):
        return FeedForward(weights, kernels)
    assert config.mixture is not None, "expert weights without a mixture"
    return ExpertMixture(config.mixture, weights, kernels)


def _head_norm(config: ModelConfig, weights: LayerWeights) -> RmsNorm | None:
    """One norm over query and key heads together, by a weight `[num_heads + num_kv_heads, head_dim]`."""
    if weights.query_norm is None or weights.key_norm is None:
        return None
    query = weights.query_norm.expand(config.num_heads, -1)
    key = weights.key_norm.expand(config.num_kv_heads, -1)
    return RmsNorm(torch.cat((query, key)), config.rms_norm_eps)
