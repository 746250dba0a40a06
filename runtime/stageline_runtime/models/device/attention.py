"""Attention over the paged cache on a device, by Triton's kernels (`kernels`).

Arguments that a captured launch would freeze (grid, sizes) depend on shapes alone; what changes from plan to plan lies
in the tables that the kernels read.
"""

import math

import torch

from stageline_runtime.models.layers.attention import AttentionHeads, Rotary
from stageline_runtime.models.layers.kv_cache import LayerCache
from stageline_runtime.models.layers.step_batch import StepTensors, Tiling, next_power_of_two
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS

DECODE_BLOCK_TOKENS = 64
"""Positions that one step of a decode program reads."""
PREFILL_ROWS = 64
"""Rows of a prefill tile: tokens times the query heads that share a key/value head."""
PROGRAMS_PER_PROCESSOR = 16
"""Decode programs that long rows share, beyond one for each row: enough to keep all processors busy."""


def device_tiling(heads: AttentionHeads, num_processors: int) -> Tiling:
    """Prefill tiles of the kernels' size, and parts of contexts, for which every step launches programs."""
    return Tiling(
        tile_tokens=max(1, PREFILL_ROWS // heads.group_size),
        spare_parts=max(1, PROGRAMS_PER_PROCESSOR * num_processors // heads.num_kv_heads),
        least_part_tokens=DECODE_BLOCK_TOKENS,
    )


class TritonAttention:
    """The kernels of `kernels`. The table says how the contexts of a decode are split; the grid is the same for all
    plans of a size, so that a captured launch holds. `num_processors` is that of the device.
    """

    rotates = False

    def __init__(self, heads: AttentionHeads, num_processors: int) -> None:
        from stageline_runtime.models.device import kernels  # needs triton, which CPU builds of torch lack

        self._kernels = kernels
        self._heads = heads
        self.tiling = device_tiling(heads, num_processors)
        self._wide_products = type(kernels.attend_tiles).__name__ == "InterpretedFunction"
        self._block_d = max(16, next_power_of_two(heads.head_dim))

    def __call__(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary,  # noqa: ARG002 - the protocol's
        cache: LayerCache,
        step: StepTensors,
        window: int | None,
    ) -> torch.Tensor:
        for given in (query_key, value):
            assert given.stride()[1:] == (self._heads.head_dim, 1), given.stride()
        self._store(query_key, value, cache, step)
        num_tokens, group_rows = query_key.shape[0], max(16, next_power_of_two(self._heads.group_size))
        output = query_key.new_empty(num_tokens, self._heads.num_heads * self._heads.head_dim)
        if len(step.decode_tiles):
            self._decode(query_key, cache, step, output, window, group_rows)
        if len(step.prefill_tiles):
            tile_rows = max(group_rows, PREFILL_ROWS)
            self._attend(query_key, cache, step, step.prefill_tiles, output, window, tile_rows, None)
        return output

    def _store(self, query_key: torch.Tensor, value: torch.Tensor, cache: LayerCache, step: StepTensors) -> None:
        heads = self._heads
        self._kernels.store_tokens[(query_key.shape[0], heads.num_kv_heads)](
            query_key,
            value,
            *cache,
            step.tokens,
            step.block_table,
            query_key.stride(0),
            value.stride(0),
            step.block_table.shape[1],
            NUM_HEADS=heads.num_heads,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_D=self._block_d,
            BLOCK_TOKENS=BLOCK_TOKENS,
        )

    def _decode(
        self,
        query_key: torch.Tensor,
        cache: LayerCache,
        step: StepTensors,
        output: torch.Tensor,
        window: int | None,
        rows_of_tile: int,
    ) -> None:
        heads = self._heads
        # A row with spare parts has at most as many again as it has spare ones.
        num_partials = 2 * self.tiling.spare_parts * heads.num_heads
        sums = torch.empty(num_partials, heads.head_dim, dtype=torch.float32, device=output.device)
        scales = torch.empty(num_partials, 2, dtype=torch.float32, device=output.device)
        self._attend(query_key, cache, step, step.decode_tiles, output, window, rows_of_tile, (sums, scales))
        self._kernels.add_parts[(len(step.decode_tiles), heads.num_heads)](
            sums,
            scales,
            step.decode_tiles,
            step.decode_parts,
            output,
            NUM_HEADS=heads.num_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_D=self._block_d,
        )

    def _attend(
        self,
        query_key: torch.Tensor,
        cache: LayerCache,
        step: StepTensors,
        tiles: torch.Tensor,
        output: torch.Tensor,
        window: int | None,
        rows_of_tile: int,
        partials: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """`partials`: of a decode, where the parts of a context go."""
        heads = self._heads
        sums, scales = partials or (output, output)
        num_programs = len(tiles) + (self.tiling.spare_parts if partials else 0)
        self._kernels.attend_tiles[(num_programs, heads.num_kv_heads)](
            query_key,
            *cache,
            tiles,
            step.decode_parts,
            step.block_table,
            output,
            sums,
            scales,
            len(tiles),
            query_key.stride(0),
            step.block_table.shape[1],
            window or 0,
            1 / math.sqrt(heads.head_dim),
            GROUP=heads.group_size,
            NUM_KV_HEADS=heads.num_kv_heads,
            HEAD_DIM=heads.head_dim,
            BLOCK_D=self._block_d,
            BLOCK_M=rows_of_tile,
            # Keys and values of a block have to fit the processor's shared memory, also in float32.
            BLOCK_N=DECODE_BLOCK_TOKENS if output.dtype.itemsize < 4 else DECODE_BLOCK_TOKENS // 2,
            IN_PARTS=partials is not None,
            BLOCK_TOKENS=BLOCK_TOKENS,
            WIDE_PRODUCTS=self._wide_products,
        )
