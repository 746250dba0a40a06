"""Attention of one layer over the paged cache, behind one small protocol: the C kernels on CPUs, Triton's on devices,
or torch's own operators.

All store the step's keys and values first. What changes from plan to plan lies in the tables that all read.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from stageline_runtime.models.layers.kv_cache import LayerCache
from stageline_runtime.models.layers.step_batch import WHOLE_CHUNKS, StepTensors, Tiling
from stageline_runtime.native.attention_kernel import AttentionInputs, AttentionKernel
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[num_tokens, 1, head_dim]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


class Attention(Protocol):
    """Attention of one layer: store, then attend."""

    rotates: bool
    """Whether it rotates queries and keys itself."""
    tiling: Tiling

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary,
        cache: LayerCache,
        step: StepTensors,
        window: int | None,
    ) -> torch.Tensor:
        """Map heads to `[padded_tokens, num_heads * head_dim]`, zero for padding.

        Args:
            query_key: `[padded_tokens, num_heads + num_kv_heads, head_dim]`, rotated unless `rotates`.
            value: `[padded_tokens, num_kv_heads, head_dim]`.
            rotary: what to rotate by.
            cache: keys and values.
            step: the plan's tables.
            window: positions that a query sees, its own included; None for all.
        """


class NativeAttention:
    """The compiled kernels, which rotate, store and attend in one pass."""

    rotates = True
    tiling = WHOLE_CHUNKS

    def __init__(self, kernel: AttentionKernel, heads: AttentionHeads) -> None:
        self._kernel = kernel
        self._heads = heads

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary,
        cache: LayerCache,
        step: StepTensors,
        window: int | None,
    ) -> torch.Tensor:
        output = query_key.new_empty(query_key.shape[0], self._heads.num_heads * self._heads.head_dim)
        inputs = AttentionInputs(query_key, value, rotary, cache, step.block_table, output, window)
        if len(step.decode_tiles):
            self._kernel.decode(inputs, step.decode_tiles)
        if len(step.prefill_tiles):
            self._kernel.prefill(inputs, step.prefill_tiles)
        return output


class RowAttention:
    """Torch's own operators, one row of the plan after the other: for CPUs without compiled kernels."""

    rotates = False
    tiling = WHOLE_CHUNKS

    def __init__(self, heads: AttentionHeads) -> None:
        self._heads = heads

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary,  # noqa: ARG002 - the protocol's
        cache: LayerCache,
        step: StepTensors,
        window: int | None,
    ) -> torch.Tensor:
        heads = self._heads
        query = query_key[:, : heads.num_heads]
        store(query_key[:, heads.num_heads :], value, cache, step)
        output = torch.zeros_like(query)
        for row in rows_of(step):
            visible = visible_positions(row.positions, row.end, window)
            output[row.tokens] = attend_row(query[row.tokens], *row.content(cache, step), visible)
        return output.flatten(1)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Consecutive tokens of one slot."""

    tokens: slice
    slot: int
    positions: torch.Tensor
    """`[num_tokens]`"""
    end: int
    """Position behind the last one."""

    def content(self, cache: LayerCache, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[num_kv_heads, end, head_dim]` of all positions up to the row's last one."""
        blocks = step.block_table[self.slot, : blocks_of(self.end)].long()
        keys, values = (part[blocks].transpose(0, 1).flatten(1, 2)[:, : self.end] for part in cache)
        return keys, values


def rows_of(step: StepTensors) -> Iterator[BatchRow]:
    """The rows of a plan, without padding; a long chunk in the tiles that the table has."""
    for first, count, slot, position in (*step.decode_tiles.tolist(), *step.prefill_tiles.tolist()):
        if slot >= 0:
            positions = torch.arange(position, position + count)
            yield BatchRow(slice(first, first + count), slot, positions, position + count)


def store(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, step: StepTensors) -> None:
    """Write keys and values `[padded_tokens, num_kv_heads, head_dim]` to their places; padding's to the spare block."""
    slots, positions = step.tokens[:, 0].long(), step.tokens[:, 1].long()
    blocks = step.block_table[slots, positions // BLOCK_TOKENS].long()
    for part, new in zip(cache, (key, value), strict=True):
        part[blocks, :, positions % BLOCK_TOKENS] = new


def visible_positions(positions: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
    """Which of `context` positions a query at each of `positions` `[num_queries]` sees: `[num_queries, context]`."""
    queries, seen = positions[:, None], torch.arange(context, device=positions.device)[None, :]
    visible = seen <= queries
    return visible if window is None else visible & (seen > queries - window)


def attend_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend `[num_tokens, num_heads, head_dim]` over `[num_kv_heads, context, head_dim]`, to the shape of the queries.

    `visible` is `[num_tokens, context]`; `scale` None takes `1 / sqrt(head_dim)`. The query heads of a key/value head
    are folded into the query length, so that each key is read once.
    """
    num_tokens, num_heads, head_dim = query.shape
    group_size = num_heads // len(keys)
    folded = query.transpose(0, 1).reshape(1, len(keys), group_size * num_tokens, head_dim)
    allowed = visible.repeat(group_size, 1)[None, None]
    if softcap is None:
        attended = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=allowed, scale=scale)
    else:
        scores = folded @ keys.transpose(1, 2) * (scale if scale is not None else 1 / math.sqrt(head_dim))
        scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        attended = F.softmax(scores, dim=-1, dtype=torch.float32).to(folded.dtype) @ values
    return attended.reshape(num_heads, num_tokens, head_dim).transpose(0, 1)


class PlainAttention:
    """Torch's own operators over whole slots: slow, static in shape, the oracle for the kernels of devices."""

    rotates = False
    tiling = WHOLE_CHUNKS

    def __init__(self, heads: AttentionHeads) -> None:
        self._heads = heads

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary,  # noqa: ARG002 - the protocol's
        cache: LayerCache,
        step: StepTensors,
        window: int | None,
    ) -> torch.Tensor:
        heads = self._heads
        store(query_key[:, heads.num_heads :], value, cache, step)
        slots, positions = step.tokens[:, 0].long(), step.tokens[:, 1].long()
        tables = step.block_table[slots].long()
        keys, values = (part[tables].transpose(1, 2).flatten(2, 3) for part in cache)
        query = query_key[:, : heads.num_heads].reshape(-1, heads.num_kv_heads, heads.group_size, heads.head_dim)
        scores = (query.float() @ keys.float().transpose(-1, -2)) / math.sqrt(heads.head_dim)
        visible = visible_positions(positions, keys.shape[2], window)
        weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
        # What lies behind a row's own position may be anything, even NaN, and has no weight.
        contents = values.float().masked_fill(~visible[:, None, :, None], 0.0)
        attended: torch.Tensor = (weights @ contents).flatten(1).masked_fill((slots < 0)[:, None], 0.0)
        return attended.to(query_key.dtype)
