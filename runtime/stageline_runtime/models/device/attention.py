"""Attention over the paged cache on a device, behind one small protocol: Triton's kernels, or plain torch as oracle.

Both write the step's keys and values first. Arguments that a captured launch would freeze (grid, sizes) depend on
shapes alone; what changes from plan to plan lies in the table that both read.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS

DECODE_BLOCK_TOKENS = 64
"""Positions that one step of a decode program reads."""
PREFILL_ROWS = 64
"""Rows of a prefill tile: tokens times the query heads that share a key/value head."""
MOST_SPLITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    slot_tokens: int

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def prefill_tile_tokens(self) -> int:
        return max(1, PREFILL_ROWS // self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """A plan's table on the device, as views of one buffer: all int32."""

    tokens: torch.Tensor
    """`[padded_tokens, 2]`: slot (-1 for padding) and position."""
    decode_tiles: torch.Tensor
    """`[num_tiles, 4]`: single-token rows and padding."""
    prefill_tiles: torch.Tensor
    """`[num_tiles, 4]`."""
    block_table: torch.Tensor
    """`[num_slots + 1, blocks_per_slot]`: the block of each part of each slot. The last row, which slot -1 reads, names
    a block that is no slot's."""


class DeviceAttention(Protocol):
    """Attention of one layer: store, then attend."""

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: DeviceRows,
        window: int | None,
    ) -> torch.Tensor:
        """Map rotated heads to `[padded_tokens, num_heads * head_dim]`, zero for padding.

        Args:
            query_key: `[padded_tokens, num_heads + num_kv_heads, head_dim]`.
            value: `[padded_tokens, num_kv_heads, head_dim]`.
            cache: keys and values `[num_blocks + 1, num_kv_heads, BLOCK_TOKENS, head_dim]`.
            rows: the plan's table.
            window: positions that a query sees, its own included; None for all.
        """


class TritonAttention:
    """The kernels of `kernels`; `num_processors` of the device decide how far a decode's context is split."""

    def __init__(self, heads: AttentionHeads, num_processors: int) -> None:
        from stageline_runtime.models.device import kernels  # needs triton, which CPU builds of torch lack

        self._kernels = kernels
        self._heads = heads
        self._num_processors = num_processors
        self._wide_products = type(kernels.attend_tiles).__name__ == "InterpretedFunction"
        self._block_d = max(16, next_power_of_two(heads.head_dim))

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: DeviceRows,
        window: int | None,
    ) -> torch.Tensor:
        for given in (query_key, value):
            assert given.stride()[1:] == (self._heads.head_dim, 1), given.stride()
        self._store(query_key, value, cache, rows)
        num_tokens, group_rows = query_key.shape[0], max(16, next_power_of_two(self._heads.group_size))
        output = query_key.new_empty(num_tokens, self._heads.num_heads * self._heads.head_dim)
        if len(rows.decode_tiles):
            splits = self.splits(num_tokens)
            self._attend(query_key, cache, rows, rows.decode_tiles, output, window, group_rows, splits)
        if len(rows.prefill_tiles):
            tile_rows = max(group_rows, PREFILL_ROWS)
            self._attend(query_key, cache, rows, rows.prefill_tiles, output, window, tile_rows, 1)
        return output

    def splits(self, num_tokens: int) -> int:
        """Programs that share one decode row's context: enough to keep all processors busy, no more than it has blocks.

        A function of shapes alone, so that a captured launch and an eager one add up in the same order.
        """
        programs = num_tokens * self._heads.num_kv_heads
        wanted = max(1, 2 * self._num_processors // programs)
        blocks = -(-self._heads.slot_tokens // DECODE_BLOCK_TOKENS)
        return 1 << (min(wanted, blocks, MOST_SPLITS).bit_length() - 1)

    def _store(
        self, query_key: torch.Tensor, value: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], rows: DeviceRows
    ) -> None:
        heads = self._heads
        self._kernels.store_tokens[(query_key.shape[0], heads.num_kv_heads)](
            query_key,
            value,
            *cache,
            rows.tokens,
            rows.block_table,
            query_key.stride(0),
            value.stride(0),
            rows.block_table.shape[1],
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_D=self._block_d,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )

    def _attend(
        self,
        query_key: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: DeviceRows,
        tiles: torch.Tensor,
        output: torch.Tensor,
        window: int | None,
        rows_of_tile: int,
        splits: int,
    ) -> None:
        heads = self._heads
        parts = len(tiles) * heads.num_heads * splits if splits > 1 else 0
        sums = torch.empty(parts, heads.head_dim, dtype=torch.float32, device=output.device)
        scales = torch.empty(parts, 2, dtype=torch.float32, device=output.device)
        self._kernels.attend_tiles[(len(tiles), heads.num_kv_heads, splits)](
            query_key,
            *cache,
            tiles,
            rows.block_table,
            output,
            sums,
            scales,
            query_key.stride(0),
            rows.block_table.shape[1],
            window or 0,
            1 / math.sqrt(heads.head_dim),
            GROUP=heads.group_size,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_D=self._block_d,
            BLOCK_M=rows_of_tile,
            # Keys and values of a block have to fit the processor's shared memory, also in float32.
            BLOCK_N=DECODE_BLOCK_TOKENS if output.dtype.itemsize < 4 else DECODE_BLOCK_TOKENS // 2,
            SPLITS=splits,
            BLOCK_TOKENS=BLOCK_TOKENS,
            WIDE_PRODUCTS=self._wide_products,
        )
        if splits > 1:
            self._add_splits(sums, scales, tiles, output, splits)

    def _add_splits(
        self, sums: torch.Tensor, scales: torch.Tensor, tiles: torch.Tensor, output: torch.Tensor, splits: int
    ) -> None:
        heads = self._heads
        self._kernels.add_splits[(len(tiles), heads.num_heads)](
            sums,
            scales,
            tiles,
            output,
            NUM_HEADS=heads.num_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_D=self._block_d,
            SPLITS=splits,
            BLOCK_S=splits,
        )


class PlainAttention:
    """The same by torch's own operators, over whole slots: slow, static in shape, the oracle for the kernels.

    The cache holds one block more than slots have, which takes what padding writes.
    """

    def __init__(self, heads: AttentionHeads) -> None:
        self._heads = heads

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: DeviceRows,
        window: int | None,
    ) -> torch.Tensor:
        heads = self._heads
        slots, positions = rows.tokens[:, 0].long(), rows.tokens[:, 1].long()
        tables = rows.block_table[slots].long()
        blocks = tables.gather(1, positions[:, None] // BLOCK_TOKENS)[:, 0]
        for part, new in zip(cache, (query_key[:, heads.num_heads :], value), strict=True):
            part[blocks, :, positions % BLOCK_TOKENS] = new
        keys, values = (part[tables].transpose(1, 2).flatten(2, 3) for part in cache)
        query = query_key[:, : heads.num_heads].reshape(-1, heads.num_kv_heads, heads.group_size, heads.head_dim)
        scores = (query.float() @ keys.float().transpose(-1, -2)) / math.sqrt(heads.head_dim)
        seen = torch.arange(keys.shape[2], device=scores.device)[None, :]
        visible = seen <= positions[:, None]
        if window is not None:
            visible &= seen > positions[:, None] - window
        weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
        # What lies behind a row's own position may be anything, even NaN, and has no weight.
        contents = values.float().masked_fill(~visible[:, None, :, None], 0.0)
        attended: torch.Tensor = (weights @ contents).flatten(1).masked_fill((slots < 0)[:, None], 0.0)
        return attended.to(query_key.dtype)


def next_power_of_two(number: int) -> int:
    """The smallest that holds `number`: Triton's blocks have such sizes."""
    return 1 << (number - 1).bit_length()
