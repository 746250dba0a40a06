"""A Llama-like decoder, cut to one stage: all families of `model_families` as one parameterised implementation.

What differs between them (head norms, biases, windows, mixtures of experts, head size, tied head, rotary scaling)
follows from `ModelConfig` and from which weights are there. Numerics follow Hugging Face's implementation operation by
operation, so that float32 runs give the same greedy tokens. The residual stream is the only tensor between layers and
between stages.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from stageline_api.runtime_config import LayerRange
from stageline_runtime.messages import StepPlan
from stageline_runtime.model_config import ModelConfig
from stageline_runtime.models.attention import attend
from stageline_runtime.models.attention_batch import AttentionBatch, CacheShape, build_attention_batch
from stageline_runtime.models.kv_cache import KvCache
from stageline_runtime.models.linear import Linear
from stageline_runtime.models.mixture import ExpertMixture
from stageline_runtime.models.native.decode_kernel import DecodeKernel, HeadShape, build_decode_kernel
from stageline_runtime.models.normalization import RmsNorm
from stageline_runtime.models.rotary import RotaryTable, rotate
from stageline_runtime.models.weights import (
    DenseWeights,
    ExpertWeights,
    LayerWeights,
    Progress,
    Projection,
    StageWeights,
)
from stageline_runtime.models.windows import narrow


class FeedForward:
    """Gated feed-forward block: `down(silu(gate(x)) * up(x))` with gate and up in one projection."""

    def __init__(self, weights: DenseWeights) -> None:
        self._gate_up = _linear(weights.gate_up)
        self._down = _linear(weights.down)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape."""
        gate, up = self._gate_up(rows).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)


class DecoderLayer:
    """One layer: attention and feed-forward, each added to the residual stream after a pre-norm."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, kernel: DecodeKernel | None, window: int | None
    ) -> None:
        self._config = config
        self._kernel = kernel
        self._window = window
        self._input_norm = RmsNorm(weights.input_norm, config.rms_norm_eps)
        self._qkv = _linear(weights.qkv)
        self._head_norm = _head_norm(config, weights)
        self._output = _linear(weights.output)
        self._feed_forward_norm = RmsNorm(weights.feed_forward_norm, config.rms_norm_eps)
        self._feed_forward = _feed_forward(config, weights.feed_forward)

    def __call__(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        layer: int,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Map hidden `[padded_tokens, hidden_size]` to the same shape; `layer` counts within the stage."""
        attended = self._attend(self._input_norm(hidden), rotary, cache, layer, batch)
        hidden = hidden + self._output(attended)
        return hidden + self._feed_forward(self._feed_forward_norm(hidden))

    def _attend(
        self,
        rows: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        layer: int,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Store keys and values of normed `[padded_tokens, hidden_size]`, attend: `[padded_tokens, heads * size]`."""
        query_key, value = self._project(rows)
        keys, values = cache.keys[layer], cache.values[layer]
        num_heads = self._config.num_heads
        if self._kernel is not None and not batch.prefill:
            output = query_key.new_zeros(rows.shape[0], num_heads * self._config.head_dim)
            self._kernel(query_key, value, rotary, (keys, values), batch.decode_rows, output, self._window)
            return output
        rotated = rotate(query_key, *rotary)
        cache.write(layer, rotated[:, num_heads:], value, batch)
        if self._kernel is None or not batch.decode:
            return attend(rotated[:, :num_heads], keys, values, batch)
        output = attend(rotated[:, :num_heads], keys, values, replace(batch, decode=()))
        self._kernel(rotated, value, None, (keys, values), batch.decode_rows, output, self._window)
        return output

    def _project(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key heads together, not rotated yet, and value heads: `[num_tokens, heads, head_dim]`."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = self._qkv(rows).view(rows.shape[0], num_heads + 2 * num_kv_heads, self._config.head_dim)
        query_key, value = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        return query_key if self._head_norm is None else self._head_norm(query_key), value


class DecoderStage:
    """Layers `first..last` of a decoder with their KV cache; the first stage embeds, the last has the head."""

    def __init__(
        self,
        config: ModelConfig,
        weights: StageWeights,
        cache: KvCache,
        cache_shape: CacheShape,
        windows: tuple[int | None, ...],
        kernel: DecodeKernel | None,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._embedding = weights.embedding() if is_first else None
        self._layers = tuple(
            DecoderLayer(config, layer, kernel, window) for layer, window in zip(weights.layers(), windows, strict=True)
        )
        self._final_norm = RmsNorm(weights.final_norm(), config.rms_norm_eps) if is_last else None
        self._head = self._build_head(config, weights) if is_last else None
        self._rotary = RotaryTable(config, cache_shape.slot_tokens, cache_shape.dtype)
        self._cache = cache
        self._cache_shape = cache_shape
        self._windows = windows

    def _build_head(self, config: ModelConfig, weights: StageWeights) -> Linear:
        if config.tie_word_embeddings and self._embedding is not None:
            return Linear(self._embedding)
        return Linear(weights.head())

    def attention_batch(self, plan: StepPlan) -> AttentionBatch:
        """Indices and masks of a plan, for `layers`.

        Raises:
            ValueError: a row lies outside the cache.
        """
        return build_attention_batch(plan.rows, plan.padded_tokens, self._cache_shape)

    def reset_slot(self, slot: int) -> None:
        """Zero what earlier requests left in `slot`; call it for each of a plan's fills before `layers`."""
        self._cache.reset_slot(slot)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids `[num_tokens]` int64 to hidden `[num_tokens, hidden_size]`. First stage only."""
        assert self._embedding is not None, "this stage holds no embedding"
        return F.embedding(token_ids, self._embedding)

    @torch.inference_mode()
    def layers(self, hidden: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Run the stage's layers over hidden `[padded_tokens, hidden_size]`, writing their keys and values."""
        self._cache.mark_written(batch)
        rotary = self._rotary.at(batch.positions)
        batches = {window: narrow(batch, window) for window in set(self._windows) if window is not None}
        for index, (layer, window) in enumerate(zip(self._layers, self._windows, strict=True)):
            seen = batch if window is None else batches[window]
            hidden = layer(hidden, rotary, self._cache, index, seen)
        return hidden

    @torch.inference_mode()
    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Map hidden `[num_rows, hidden_size]` to float32 logits `[num_rows, vocab_size]`. Last stage only."""
        assert self._final_norm is not None, "this stage holds no head"
        assert self._head is not None, "this stage holds no head"
        return self._head(self._final_norm(hidden_rows)).to(torch.float32)


def build_stage_model(
    model_dir: Path,
    config: ModelConfig,
    layer_range: LayerRange,
    *,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype,
    num_cohorts: int,
    slots_per_cohort: int,
    slot_tokens: int,
    progress: Progress,
) -> DecoderStage:
    """Load a stage's weights and reserve its KV cache of `num_cohorts * slots_per_cohort` slots.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    weights = StageWeights(
        model_dir, config, layer_range, has_embedding=is_first, has_head=is_last, dtype=dtype, progress=progress
    )
    num_slots = num_cohorts * slots_per_cohort
    cache = KvCache(
        num_layers=layer_range.count,
        num_slots=num_slots,
        num_kv_heads=config.num_kv_heads,
        slot_tokens=slot_tokens,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    shape = CacheShape(num_slots=num_slots, slot_tokens=slot_tokens, group_size=config.group_size, dtype=dtype)
    # A window that no position reaches past is none.
    windows = tuple(
        window if window is not None and window < slot_tokens else None
        for window in config.attention_windows[layer_range.first : layer_range.last + 1]
    )
    heads = HeadShape(
        num_kv_heads=config.num_kv_heads,
        group_size=config.group_size,
        head_dim=config.head_dim,
        slot_tokens=slot_tokens,
        dtype=dtype,
    )
    kernel = build_decode_kernel(heads)
    return DecoderStage(config, weights, cache, shape, windows, kernel, is_first=is_first, is_last=is_last)


def _linear(projection: Projection) -> Linear:
    return Linear(projection.weight, projection.bias)


def _feed_forward(config: ModelConfig, weights: DenseWeights | ExpertWeights) -> FeedForward | ExpertMixture:
    if isinstance(weights, DenseWeights):
        return FeedForward(weights)
    assert config.mixture is not None, "expert weights without a mixture"
    return ExpertMixture(config.mixture, weights)


def _head_norm(config: ModelConfig, weights: LayerWeights) -> RmsNorm | None:
    """One norm over query and key heads together, by a weight `[num_heads + num_kv_heads, head_dim]`."""
    if weights.query_norm is None or weights.key_norm is None:
        return None
    query = weights.query_norm.expand(config.num_heads, -1)
    key = weights.key_norm.expand(config.num_kv_heads, -1)
    return RmsNorm(torch.cat((query, key)), config.rms_norm_eps)
