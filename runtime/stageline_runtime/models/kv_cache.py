"""Keys and values of a stage's layers: one contiguous region per slot, addressed by global slot id.

A global slot id is `cohort * slots_per_cohort + index`. The memory is mapped at load, where the kernel gives zeroed
pages on first touch: pages that no request reaches cost nothing, and masked reads always meet finite numbers. A slot
is zeroed up to its high-water mark when a new request takes it: a masked weight of zero times a stale NaN would
otherwise reach that request's output.
"""

import math
import mmap

import torch

from stageline_runtime.models.attention_batch import AttentionBatch


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

    def reset_slot(self, slot: int) -> None:
        """Zero what earlier requests wrote to `slot`."""
        end = self._high_water_tokens[slot]
        for cache in (*self.keys, *self.values):
            cache[slot, :, :end].zero_()
        self._high_water_tokens[slot] = 0


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are not touched yet; `torch.zeros` would write, and so occupy, all of them."""
    size_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size_bytes} bytes of KV cache can't be reserved: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
