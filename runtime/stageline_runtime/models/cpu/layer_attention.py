"""One layer's attention over its part of the KV cache: store the step's keys and values, then attend.

Where the compiled kernels are available they do all of it; elsewhere torch's operators do, over the batch's masks. For
these, the query heads that share a key/value head are folded into the query length, so that each key is read once and
never repeated in memory. Single-token rows of consecutive slots attend in one call over a view of the cache; pieces of
prefill chunks attend one by one. The scores' scale is `1 / sqrt(head_dim)`.

A window of `w` shows a query the positions above its own minus `w`, itself included. The cache keeps every position,
so that layers with and without a window share one plan of indices.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.cpu.kv_cache import AttentionBatch, DecodeRun, KvCache, PrefillPiece
from stageline_runtime.models.cpu.operators import DecodeAttentionHandle
from stageline_runtime.models.rotary import rotate
from stageline_runtime.native.attention_kernel import AttentionInputs, AttentionKernel


def narrow(batch: AttentionBatch, window: int) -> AttentionBatch:
    """The same batch for layers with a window of `window` positions."""
    return replace(
        batch,
        prefill=tuple(
            replace(piece, mask=_narrow_mask(piece.mask, batch.positions[piece.tokens], window))
            for piece in batch.prefill
        ),
        decode=tuple(
            replace(run, mask=_narrow_mask(run.mask, batch.positions[run.tokens], window)) for run in batch.decode
        ),
    )


def _narrow_mask(mask: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
    """Close what lies before the windows of queries at `positions` `[num_queries]`; a mask may repeat them by group."""
    context = mask.shape[-1]
    too_old = torch.arange(context)[None, :] <= positions[:, None] - window
    queries = mask.numel() // context
    return mask.masked_fill(too_old.repeat(queries // len(positions), 1).view(mask.shape), float("-inf"))


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Attend all rows of a step over one layer's cache, which already holds the step's own keys and values.

    Args:
        query: `[padded_tokens, num_heads, head_dim]`.
        keys: `[num_slots, num_kv_heads, slot_tokens, head_dim]`.
        values: as `keys`.
        batch: the plan's rows.

    Returns:
        `[padded_tokens, num_heads * head_dim]`; zero for padding.
    """
    num_tokens, num_heads, head_dim = query.shape
    output = query.new_zeros(num_tokens, num_heads * head_dim)
    for run in batch.decode:
        output[run.tokens] = _attend_run(query[run.tokens], keys, values, run)
    for piece in batch.prefill:
        output[piece.tokens] = _attend_piece(query[piece.tokens], keys, values, piece)
    return output


def _attend_run(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, run: DecodeRun) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    folded = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(
        folded, keys[run.slots, :, : run.context], values[run.slots, :, : run.context], attn_mask=run.mask
    )
    return attended.reshape(num_rows, num_heads * head_dim)


def _attend_piece(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, piece: PrefillPiece) -> torch.Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    folded = query.transpose(0, 1).reshape(1, num_kv_heads, group_size * num_tokens, head_dim)
    slot = slice(piece.slot, piece.slot + 1)
    attended = F.scaled_dot_product_attention(
        folded, keys[slot, :, : piece.context], values[slot, :, : piece.context], attn_mask=piece.mask
    )
    return attended.reshape(num_heads, num_tokens, head_dim).transpose(0, 1).reshape(num_tokens, num_heads * head_dim)


Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[num_tokens, 1, head_dim]`."""


class LayerAttention:
    """Attention of the stage's layer number `layer`; `window` in tokens, None for all positions."""

    def __init__(
        self, config: ModelConfig, cache: KvCache, layer: int, kernel: AttentionKernel | None, window: int | None
    ) -> None:
        self._num_heads = config.num_heads
        self.out_features = config.num_heads * config.head_dim
        self._cache = cache
        self._layer = layer
        self._kernel = kernel
        self._window = window
        self.handle = None if kernel is None else DecodeAttentionHandle(self.decode)

    def __call__(
        self, query_key: torch.Tensor, value: torch.Tensor, rotary: Rotary, batch: AttentionBatch
    ) -> torch.Tensor:
        """Map heads `[padded_tokens, heads, head_dim]`, not rotated yet, to `[padded_tokens, num_heads * head_dim]`."""
        if self._kernel is None:
            return self.rotated(rotate(query_key, *rotary), value, batch)
        return self._compiled(self._kernel, query_key, value, rotary, batch)

    def rotated(self, query_key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """The same for heads that are rotated already."""
        if self._kernel is not None:
            return self._compiled(self._kernel, query_key, value, None, batch)
        self._cache.write(self._layer, query_key[:, self._num_heads :], value, batch)
        return attend(
            query_key[:, : self._num_heads], self._cache.keys[self._layer], self._cache.values[self._layer], batch
        )

    def decode(self, query_key: torch.Tensor, value: torch.Tensor, rotary: Rotary, rows: torch.Tensor) -> torch.Tensor:
        """The same for nothing but single-token rows and padding; `rows` has one for each token."""
        assert self._kernel is not None, "no compiled kernel"
        inputs = self._inputs(query_key, value, rotary)
        self._kernel.decode(inputs, rows)
        return inputs.output

    def _compiled(
        self,
        kernel: AttentionKernel,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        inputs = self._inputs(query_key, value, rotary)
        if batch.decode_rows.shape[0]:
            kernel.decode(inputs, batch.decode_rows)
        if batch.chunk_rows.shape[0]:
            kernel.prefill(inputs, batch.chunk_rows)
        return inputs.output

    def _inputs(self, query_key: torch.Tensor, value: torch.Tensor, rotary: Rotary | None) -> AttentionInputs:
        cache = (self._cache.keys[self._layer], self._cache.values[self._layer])
        output = query_key.new_empty(query_key.shape[0], self.out_features)
        return AttentionInputs(query_key, value, rotary, cache, output, self._window)
