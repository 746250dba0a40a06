"""The layers of a stage, each in three parts: before attention, attention, and after attention.

A device captures the parts around attention as graphs and calls the same methods when it runs eagerly, so that all ways
compute alike.
"""

from collections.abc import Callable

import torch

from stageline_runtime.model_facts.layer import Gated, Layer, Norm
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.layers.attention import Attention, Rotary
from stageline_runtime.models.layers.feed_forward import ExpertLoop, ExpertMixture, FeedForward, RunExperts
from stageline_runtime.models.layers.kv_cache import LayerCache
from stageline_runtime.models.layers.row_modules import Linear, RmsNorm, RowOperators
from stageline_runtime.models.layers.step_batch import StepTensors
from stageline_runtime.models.rotary import RotaryTable, rotate
from stageline_runtime.models.weights.stage_weights import LayerWeights
from stageline_runtime.ranks.expert_exchange import ExpertExchange
from stageline_runtime.ranks.layer_sums import LayerSums

Heads = tuple[torch.Tensor, torch.Tensor]
"""Query and key heads together, and value heads: `[padded_tokens, heads, head_dim]`."""
TurnHeads = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RmsNorm | None], torch.Tensor]
"""Norm, if the family has one, and rotation of query and key heads by cosines and sines `[num_tokens, 1, head_dim]`."""


def norm_and_rotate(
    heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, norm: RmsNorm | None
) -> torch.Tensor:
    return rotate(heads if norm is None else norm(heads), cosines, sines)


def norm_alone(heads: torch.Tensor, _cosines: torch.Tensor, _sines: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
    """For attention that rotates."""
    return heads if norm is None else norm(heads)


class LayerParts:
    """What surrounds attention: both blocks' norms and projections, and their sums into the residual stream.

    Runs wherever its weights lie. With `sums`, config and weights are one rank's part of the layer, and what the output
    projection and the feed-forward block give is summed over the ranks. With an `exchange`, which a mixture alone uses,
    weights hold one rank's experts. How these run is for `run_experts` to say, and how heads are rotated for `turn`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        kernels: RowOperators | None = None,
        sums: LayerSums | None = None,
        exchange: ExpertExchange | None = None,
        run_experts: RunExperts = ExpertLoop,
        turn: TurnHeads = norm_and_rotate,
    ) -> None:
        self._sums = sums
        self._turn = turn
        self._kernels = kernels
        self._gated_size = _gated_size(weights.layer)
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        layer = weights.layer

        def norm(described: Norm | None) -> RmsNorm | None:
            return None if described is None else RmsNorm(weights.norm(described), config.rms_norm_eps, kernels)

        self._attention_norm = norm(layer.attention_norm)
        self._qkv = Linear(*weights.fused(layer.query, layer.key, layer.value))
        self._head_norm, self._wide_norms = _query_key_norms(config, weights, kernels)
        self._output = Linear(*weights.fused(layer.output))
        self._attended_norm = norm(layer.attended_norm)
        self._feed_forward_norm = norm(layer.feed_forward_norm)
        self._feed_forward = _feed_forward(weights, kernels, exchange, run_experts)
        self._forwarded_norm = norm(layer.forwarded_norm)

    def before_attention(self, hidden: torch.Tensor, rotary: Rotary) -> Heads:
        """What attention takes of hidden `[padded_tokens, hidden_size]`."""
        query_key_heads = self._num_heads + self._num_kv_heads
        rows = self._normed_heads(self._qkv(_normed(hidden, self._attention_norm)))
        heads = rows.view(rows.shape[0], query_key_heads + self._num_kv_heads, self._head_dim)
        return self._turn(heads[:, :query_key_heads], *rotary, self._head_norm), heads[:, query_key_heads:]

    def after_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add the output of attention `[padded_tokens, num_heads * head_dim]` and then the feed-forward block's."""
        output = self._output(attended)
        if self._sums is not None:
            output = self._sums.attention(output)
        output = _normed(output, self._attended_norm)
        if self._feed_forward_norm is None:
            hidden = normed = hidden + output
        else:
            hidden, normed = self._feed_forward_norm.after_adding(hidden, output)
        forward = self._feed_forward(normed)
        if self._sums is not None:
            forward = self._sums.feed_forward(forward)
        return hidden + _normed(forward, self._forwarded_norm)

    def _normed_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """`[padded_tokens, query, key and value elements]` with what norms over all heads together make of it."""
        if self._wide_norms is None:
            return rows
        query_norm, key_norm = self._wide_norms
        num_queries, num_keys = len(query_norm.weight), len(key_norm.weight)
        query, key, value = rows.tensor_split((num_queries, num_queries + num_keys), dim=-1)
        return torch.cat((query_norm(query.contiguous()), key_norm(key.contiguous()), value), dim=-1)

    def warm_up(self, hidden: torch.Tensor, rotary: Rotary) -> None:
        """Launch each kernel on rows once, so that it gets compiled; nothing is asked of other ranks."""
        if self._kernels is None:
            return
        self.before_attention(hidden, rotary)
        if self._feed_forward_norm is not None:
            self._feed_forward_norm.after_adding(hidden, hidden.clone())
        _normed(_normed(hidden, self._attended_norm), self._forwarded_norm)
        if self._gated_size:
            self._kernels.gate(hidden.new_zeros(len(hidden), self._gated_size))


class DecoderLayers:
    """All layers of a stage with their caches."""

    def __init__(
        self,
        parts: tuple[LayerParts, ...],
        caches: tuple[LayerCache, ...],
        windows: tuple[int | None, ...],
        attention: Attention,
        rotary: RotaryTable,
    ) -> None:
        self._parts = parts
        self._caches = caches
        self._windows = windows
        self._attention = attention
        self._rotary = rotary

    def __len__(self) -> int:
        return len(self._parts)

    def rotary(self, step: StepTensors) -> Rotary:
        return self._rotary.at(step.tokens[:, 1].long())

    def before(self, layer: int, hidden: torch.Tensor, rotary: Rotary) -> Heads:
        """What comes before attention of `layer`: hidden `[padded_tokens, hidden_size]` to heads."""
        return self._parts[layer].before_attention(hidden, rotary)

    def attend(self, layer: int, heads: Heads, rotary: Rotary, step: StepTensors) -> torch.Tensor:
        """Store and attend: `[padded_tokens, num_heads * head_dim]`."""
        return self._attention(*heads, rotary, self._caches[layer], step, self._windows[layer])

    def after(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What comes after it: hidden and attended to hidden."""
        return self._parts[layer].after_attention(hidden, attended)

    def warm_up_parts(self, hidden: torch.Tensor, step: StepTensors) -> None:
        """Run every layer's kernels on rows over `hidden` of padding, which reaches neither cache nor other ranks."""
        rotary = self.rotary(step)
        for part in self._parts:
            part.warm_up(hidden, rotary)

    def __call__(self, hidden: torch.Tensor, step: StepTensors) -> torch.Tensor:
        """All layers: hidden `[padded_tokens, hidden_size]` to the same shape."""
        rotary = self.rotary(step)
        for layer in range(len(self)):
            heads = self.before(layer, hidden, rotary)
            hidden = self.after(layer, hidden, self.attend(layer, heads, rotary, step))
        return hidden


def _gated_size(layer: Layer) -> int:
    """Columns of gate and up together that the layer's rows go through: none in a mixture without a shared expert."""
    block = layer.feed_forward if isinstance(layer.feed_forward, Gated) else layer.feed_forward.shared
    return 0 if block is None else 2 * block.gate.outputs


def _feed_forward(
    weights: LayerWeights,
    kernels: RowOperators | None,
    exchange: ExpertExchange | None,
    run_experts: RunExperts,
) -> FeedForward | ExpertMixture:
    block = weights.layer.feed_forward
    if isinstance(block, Gated):
        return FeedForward(weights.dense(block), kernels)
    experts = weights.mixture(block)
    return ExpertMixture(block.sizes, experts, run_experts(experts), kernels, exchange)


def _normed(rows: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
    return rows if norm is None else norm(rows)


def _query_key_norms(
    config: ModelConfig, weights: LayerWeights, kernels: RowOperators | None
) -> tuple[RmsNorm | None, tuple[RmsNorm, RmsNorm] | None]:
    """One norm of each query and key head, by a weight `[num_heads + num_kv_heads, head_dim]`; or two, over all query
    heads together and over all key heads."""
    if weights.layer.query_key_norms is None:
        return None, None
    query, key = (weights.norm(norm) for norm in weights.layer.query_key_norms)
    eps = config.rms_norm_eps
    if len(query) != config.head_dim:
        return None, (RmsNorm(query, eps, kernels), RmsNorm(key, eps, kernels))
    heads = (query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1))
    return RmsNorm(torch.cat(heads), eps), None
