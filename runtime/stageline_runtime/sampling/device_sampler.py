"""The sampler's draws where the logits are, without ever waiting for a device: two kernels draw all rows of a plan.

They draw the tokens that `sampler.sample` draws from the same logits. What they need of the rows goes over in one small
tensor; greedy, free and restricted rows share the launches. Grids and constants follow from shapes alone.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.adjustments import Placing
from stageline_runtime.sampling.noise import BLOCK_SIZE, mixed_keys
from stageline_runtime.sampling.sampler import noise_keys, sample, top_k_of

TILE_BLOCKS = 64
"""Blocks of the vocabulary that a program looks at together."""
MOST_SPLITS = 64
"""Programs that share one row."""
PROGRAMS_PER_PROCESSOR = 8
"""Of the first kernel: enough to read while others compute."""


def sample_on_device(logits: Tensor, rows: list[RequestSampling], positions: list[int], place: Placing) -> Tensor:
    """Draw tokens `[num_rows]` int64 from float32 `logits` `[num_rows, vocab_size]`, all on the logits' device."""
    if logits.device.type == "cpu":
        return sample(logits, rows, positions)
    return draw_fused(logits, rows, positions, place, _processors(logits.device))


def compile_draws(vocab_size: int, device: torch.device) -> None:
    """Draw once, so that no step waits for a compiler."""
    sample_on_device(torch.zeros(1, vocab_size, device=device), [RequestSampling()], [0], lambda each: each.to(device))


def draw_fused(
    logits: Tensor, rows: list[RequestSampling], positions: list[int], place: Placing, processors: int
) -> Tensor:
    """The same by the kernels, wherever these run, with as many programs as keep `processors` busy."""
    from stageline_runtime.sampling import device_kernels as kernels  # needs triton, which CPU builds of torch lack

    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    drawn = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return drawn
    num_blocks = -(-vocab_size // BLOCK_SIZE)
    num_tiles = -(-num_blocks // TILE_BLOCKS)
    splits = splits_of(num_rows, num_tiles, processors)
    scratch = logits.new_empty(num_rows * (2 * splits + num_blocks + num_tiles), dtype=torch.int64)
    read = (logits, place(_parameters(rows, positions, vocab_size)), scratch)
    sizes = (logits.stride(0), vocab_size, num_blocks, num_tiles)
    kernels.scan_rows[(num_rows, splits)](*read, *sizes, TILE_BLOCKS=TILE_BLOCKS, num_warps=4)
    kernels.settle_rows[(num_rows,)](*read, drawn, *sizes, splits, **settling_constants(num_blocks), num_warps=8)
    return drawn


def splits_of(num_rows: int, num_tiles: int, processors: int) -> int:
    """Programs that share a row."""
    return max(1, min(PROGRAMS_PER_PROCESSOR * processors // num_rows, num_tiles, MOST_SPLITS))


def settling_constants(num_blocks: int) -> dict[str, int]:
    """Of the second kernel: the same for every plan of a model."""
    all_blocks = max(TILE_BLOCKS, 1 << (num_blocks - 1).bit_length())
    return {
        "TILE_BLOCKS": TILE_BLOCKS,
        "ALL_BLOCKS": all_blocks,
        "ALL_TILES": all_blocks // TILE_BLOCKS,
        "MOST_SPLITS": MOST_SPLITS,
    }


def _parameters(rows: list[RequestSampling], positions: list[int], vocab_size: int) -> Tensor:
    """`[num_rows, 5]` int64 on the host: mixed key, the bits of temperature (0: greedy), top-p and min-p, and top-k."""
    table = np.empty((len(rows), 5), dtype=np.int64)
    table[:, 0] = mixed_keys(noise_keys(rows, positions))
    shares = [(max(row.temperature, 0.0), row.top_p, row.min_p) for row in rows]
    table[:, 1:4] = np.array(shares, dtype=np.float64).view(np.int64)
    table[:, 4] = [top_k_of(row, vocab_size) for row in rows]
    return torch.from_numpy(table)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
