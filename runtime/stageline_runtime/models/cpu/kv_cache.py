"""Keys and values of a stage's layers: one contiguous region per slot, addressed by global slot id.

A global slot id is `cohort * slots_per_cohort + index`. The memory is mapped at load, where the kernel gives zeroed
pages on first touch: pages that no request reaches cost nothing, and masked reads always meet finite numbers. A slot
is zeroed up to its high-water mark when a new request takes it: a masked weight of zero times a stale NaN would
otherwise reach that request's output.
"""

import contextlib
import ctypes
import math
import mmap

import torch

from stageline_runtime.models.cpu.attention_batch import AttentionBatch

_LIBC = ctypes.CDLL(None, use_errno=True)
_MAP_NORESERVE = 0x4000
"""Linux: don't count address space that slots may never fill against what the machine has."""


class KvCache:
    """Keys and values `[num_slots, num_kv_heads, slot_tokens, head_dim]` for each of the stage's layers.

    Raises:
        MemoryError: the address space can't be reserved.
    """

    def __init__(
        self, *, num_layers: int, num_slots: int, num_kv_heads: int, slot_tokens: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        shape = (num_slots, num_kv_heads, slot_tokens, head_dim)
        self.keys = [_untouched_zeros(shape, dtype) for _ in range(num_layers)]
        self.values = [_untouched_zeros(shape, dtype) for _ in range(num_layers)]
        self._high_water_tokens = [0] * num_slots

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
        """Store the step's keys and values `[padded_tokens, num_kv_heads, head_dim]`; padding is left out.

        `layer` counts from the stage's first layer.
        """
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            for piece in batch.prefill:
                cache[piece.slot, :, piece.positions] = new[piece.tokens].transpose(0, 1)
            if batch.decode:
                cache[batch.decode_slots, :, batch.decode_positions] = new[batch.decode_tokens]

    def mark_written(self, batch: AttentionBatch) -> None:
        """Remember how far each slot is filled, so that `reset_slot` clears no more than it must."""
        for slot, end in batch.written:
            self._high_water_tokens[slot] = max(self._high_water_tokens[slot], end)

    def reset_slot(self, slot: int, keep_tokens: int = 0) -> None:
        """Zero what earlier requests wrote to `slot`, but for its first `keep_tokens` positions."""
        end = self._high_water_tokens[slot]
        if end > keep_tokens:
            for cache in (*self.keys, *self.values):
                cache[slot, :, keep_tokens:end].zero_()
            self._high_water_tokens[slot] = keep_tokens

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` positions of `source` to `target`, which has been reset."""
        assert num_tokens <= self._high_water_tokens[source], f"slot {source} holds fewer than {num_tokens} tokens"
        for cache in (*self.keys, *self.values):
            cache[target, :, :num_tokens] = cache[source, :, :num_tokens]
        self._high_water_tokens[target] = num_tokens

    def trim_slot(self, slot: int, num_tokens: int) -> None:
        """Give the memory of `slot` from position `num_tokens` on back to the kernel; it reads as zeros."""
        end = self._high_water_tokens[slot]
        if end <= num_tokens:
            return
        for cache in (*self.keys, *self.values):
            for head in cache[slot]:
                _give_back(head[num_tokens:end])
        self._high_water_tokens[slot] = num_tokens


def _give_back(region: torch.Tensor) -> None:
    """Zero a contiguous region whose memory was mapped privately, by dropping the whole pages in it."""
    start, size_bytes = region.data_ptr(), region.numel() * region.itemsize
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        region.zero_()
        return
    flat = region.view(-1).view(torch.uint8)
    flat[: first - start].zero_()
    flat[last - start :].zero_()
    if _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise refused to take KV cache back")


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are not touched yet; `torch.zeros` would write, and so occupy, all of them."""
    size_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise MemoryError(f"{size_bytes} bytes of KV cache can't be reserved: {error.strerror}") from error
    # A huge page would occupy parts of slots that nothing has reached; a kernel without huge pages refuses to be told.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
