"""Keys and values of a stage's layers, in blocks of `BLOCK_TOKENS` positions that plans allocate.

A cache has one more block than slots have: padding writes there where the write can't be skipped. Nothing is ever
cleared: attention reads no position that the present holder of a block hasn't written.

On a CPU the memory is mapped, where the kernel gives zeroed pages on first touch, so unused blocks cost nothing; and a
head's blocks are adjacent, so that neighbours among them are one contiguous range.
"""

import contextlib
import math
import mmap

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.protocol import CPU, StageShape
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values `[num_blocks + 1, num_kv_heads, BLOCK_TOKENS, head_dim]` of one layer."""
_MAP_NORESERVE = 0x4000
"""Linux: don't count address space that may never be filled against what the machine has."""


def make_cache(
    config: ModelConfig, shape: StageShape, num_blocks: int, device: torch.device = CPU
) -> tuple[LayerCache, ...]:
    """A cache for each of the stage's layers.

    Raises:
        MemoryError: the address space can't be reserved.
        RuntimeError: the device has no room for it.
    """

    def blocks() -> torch.Tensor:
        if device != CPU:
            size = (num_blocks + 1, config.num_kv_heads, BLOCK_TOKENS, config.head_dim)
            return torch.zeros(size, dtype=shape.dtype, device=device)
        size = (config.num_kv_heads, num_blocks + 1, BLOCK_TOKENS, config.head_dim)
        return _untouched_zeros(size, shape.dtype).transpose(0, 1)

    return tuple((blocks(), blocks()) for _ in range(shape.layers.count))


def _untouched_zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in untouched pages; `torch.zeros` would write all pages, and so allocate them."""
    size_bytes = math.prod(size) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise MemoryError(f"{size_bytes} bytes of KV cache can't be reserved: {error.strerror}") from error
    # A huge page would occupy parts of unused blocks; a kernel without huge pages rejects the advice.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)
