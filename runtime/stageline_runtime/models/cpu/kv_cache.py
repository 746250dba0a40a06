"""The KV cache of a CPU stage, and which token of a plan reads and writes which part of it.

Keys and values lie in one contiguous region per slot, addressed by global slot id (`cohort * slots_per_cohort +
index`). The memory is mapped at load, where the kernel gives zeroed pages on first touch: pages that no request reaches
cost nothing, and masked reads always meet finite numbers. A slot is zeroed up to its high-water mark when a new request
takes it: a masked weight of zero times a stale NaN would otherwise reach that request's output.

The indices of a plan are worked out once for all layers. Invariants: every index follows from the plan alone, so all
stages agree; padding tokens own no slot and so can't write to one; a query sees exactly the positions up to its own.
Reads are padded to a bucket so that shapes are few; what lies in the padding is masked.
"""

import contextlib
import ctypes
import math
import mmap
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.plan_bus.messages import GraphMode, PlanRow

CONTEXT_BUCKET_TOKENS = 64
PREFILL_PIECE_TOKENS = 64
"""Longer chunks attend in pieces, so that the early ones don't score the positions masked from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Sizes of the KV cache that indices are checked against, and how queries fold."""

    num_slots: int
    slot_tokens: int
    group_size: int
    dtype: torch.dtype
    masks: bool = True
    """Whether attention is plain operators, which need masks; compiled kernels need only the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPiece:
    """Consecutive tokens of one request's prefill chunk. Only where there are masks."""

    tokens: slice
    """The piece's tokens within the step."""
    slot: int
    positions: slice
    """Where the piece's keys and values go."""
    context: int
    """Padded number of positions read."""
    mask: torch.Tensor
    """Additive, `[group_size * num_tokens, context]`; group-major, as the folded queries are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Single-token rows of consecutive slots, so that their cache is one view. Only where there are masks."""

    tokens: slice | torch.Tensor
    slots: slice
    context: int
    mask: torch.Tensor
    """Additive, `[num_rows, 1, 1, context]`."""

    @property
    def num_rows(self) -> int:
        return self.mask.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """A plan's rows, as attention needs them."""

    positions: torch.Tensor
    """`[padded_tokens]` int64; zero for padding."""
    prefill: tuple[PrefillPiece, ...]
    decode: tuple[DecodeRun, ...]
    decode_rows: torch.Tensor
    """`[num_decode_rows + padding, 3]` int64: token, slot and position of each single-token row, in the order of their
    slots, as the compiled kernel reads them; then the padding, with slot -1."""
    chunk_rows: torch.Tensor
    """`[num_chunks, 4]` int64: first token, slot, first position and number of tokens of each prefill chunk."""
    graph_mode: GraphMode
    written: Sequence[tuple[int, int]]
    """(slot, end position) of each row, for the cache's high-water marks."""


_EMPTY: Final = {width: torch.empty(0, width, dtype=torch.int64) for width in (3, 4)}
"""Tables of no row, by width: a step that only decodes has no chunk."""
_DecodeRow = tuple[int, int, int]
"""Slot, token and position of a single-token row; they sort by slot. A plain tuple: one is made for each row of each
step."""


def build_attention_batch(
    rows: Sequence[PlanRow], padded_tokens: int, shape: CacheShape, graph_mode: GraphMode = GraphMode.OFF
) -> AttentionBatch:
    """Work out the indices and masks of a plan.

    Raises:
        ValueError: a row lies outside the cache or the rows don't fit `padded_tokens`; a bug in whoever planned it.
    """
    decode, chunks, positions = _placed(rows, padded_tokens, shape)
    kernel_rows = _kernel_rows(decode, range(len(positions), padded_tokens))
    positions += [0] * (padded_tokens - len(positions))
    return AttentionBatch(
        positions=torch.frombuffer(array("q", positions), dtype=torch.int64),
        prefill=tuple(piece for offset, row in chunks for piece in _prefill_pieces(row, offset, shape)),
        decode=tuple(_decode_run(run, shape) for run in _consecutive(decode)) if shape.masks else (),
        decode_rows=_table(kernel_rows, 3),
        chunk_rows=_table(_chunk_rows(chunks), 4),
        graph_mode=graph_mode,
        written=[(row.slot, row.position + row.num_tokens) for row in rows],
    )


def _placed(
    rows: Sequence[PlanRow], padded_tokens: int, shape: CacheShape
) -> tuple[list[_DecodeRow], list[tuple[int, PlanRow]], list[int]]:
    """Single-token rows by slot, longer ones with their first token's place in the step, and all tokens' positions."""
    decode: list[_DecodeRow] = []
    chunks: list[tuple[int, PlanRow]] = []
    positions: list[int] = []
    num_slots, slot_tokens = shape.num_slots, shape.slot_tokens
    for row in rows:
        slot, position, num_tokens = row.slot, row.position, row.num_tokens
        if not (0 <= slot < num_slots and num_tokens > 0 and 0 <= position <= slot_tokens - num_tokens):
            raise _misplaced(row, shape)
        if num_tokens == 1:
            decode.append((slot, len(positions), position))
            positions.append(position)
        else:
            chunks.append((len(positions), row))
            positions += range(position, position + num_tokens)
    if len(positions) > padded_tokens:
        raise ValueError(f"rows need {len(positions)} tokens, but the plan is padded to {padded_tokens}")
    decode.sort()
    return decode, chunks, positions


def _misplaced(row: PlanRow, shape: CacheShape) -> ValueError:
    if not 0 <= row.slot < shape.num_slots:
        return ValueError(f"slot {row.slot} is outside the cache's {shape.num_slots} slots")
    return ValueError(
        f"slot {row.slot}: {row.num_tokens} tokens at position {row.position} don't fit {shape.slot_tokens}"
    )


def _kernel_rows(decode: list[_DecodeRow], padding: range) -> list[int]:
    """Token, slot and position of each single-token row, one after the other; padding owns no slot."""
    rows: list[int] = []
    for slot, token, position in decode:
        rows += (token, slot, position)
    for token in padding:
        rows += (token, -1, 0)
    return rows


def _chunk_rows(chunks: list[tuple[int, PlanRow]]) -> list[int]:
    """First token, slot, first position and number of tokens of each chunk, one after the other."""
    rows: list[int] = []
    for offset, row in chunks:
        rows += (offset, row.slot, row.position, row.num_tokens)
    return rows


def _table(numbers: list[int], width: int) -> torch.Tensor:
    """`[num_rows, width]` int64. `torch.tensor` would look at each number."""
    if not numbers:
        return _EMPTY[width]
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).view(-1, width)


def _padded_context(length: int, shape: CacheShape) -> int:
    buckets = -(-length // CONTEXT_BUCKET_TOKENS)
    return min(buckets * CONTEXT_BUCKET_TOKENS, shape.slot_tokens)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where visible, minus infinity elsewhere, in the queries' dtype so that no layer converts it again."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def _prefill_pieces(row: PlanRow, offset: int, shape: CacheShape) -> Iterator[PrefillPiece]:
    if not shape.masks:
        return
    for start in range(0, row.num_tokens, PREFILL_PIECE_TOKENS):
        stop = min(start + PREFILL_PIECE_TOKENS, row.num_tokens)
        positions = slice(row.position + start, row.position + stop)
        context = _padded_context(positions.stop, shape)
        visible = torch.arange(context)[None, :] <= torch.arange(positions.start, positions.stop)[:, None]
        yield PrefillPiece(
            tokens=slice(offset + start, offset + stop),
            slot=row.slot,
            positions=positions,
            context=context,
            mask=_additive(visible, shape.dtype).repeat(shape.group_size, 1),
        )


def _consecutive(rows: list[_DecodeRow]) -> list[list[_DecodeRow]]:
    """Split rows, ordered by slot, where a slot is skipped."""
    runs: list[list[_DecodeRow]] = [rows[:1]] if rows else []
    for (slot_before, _, _), row in pairwise(rows):
        if row[0] == slot_before + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _decode_run(run: list[_DecodeRow], shape: CacheShape) -> DecodeRun:
    slots, tokens, positions = zip(*run, strict=True)
    context = _padded_context(max(positions) + 1, shape)
    last_visible = torch.tensor(positions)[:, None]
    visible = torch.arange(context)[None, :] <= last_visible
    in_order = tokens == tuple(range(tokens[0], tokens[0] + len(tokens)))
    return DecodeRun(
        tokens=slice(tokens[0], tokens[-1] + 1) if in_order else torch.tensor(tokens, dtype=torch.int64),
        slots=slice(slots[0], slots[-1] + 1),
        context=context,
        mask=_additive(visible, shape.dtype)[:, None, None, :],
    )


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
        num_decode_rows = sum(run.num_rows for run in batch.decode)
        tokens, slots, positions = batch.decode_rows[:num_decode_rows].unbind(1)
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            for piece in batch.prefill:
                cache[piece.slot, :, piece.positions] = new[piece.tokens].transpose(0, 1)
            if batch.decode:
                cache[slots, :, positions] = new[tokens]

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


def cache_of(config: ModelConfig, shape: StageShape) -> KvCache:
    """Reserve the cache of one stage of a model."""
    return KvCache(
        num_layers=shape.layers.count,
        num_slots=shape.num_slots,
        num_kv_heads=config.num_kv_heads,
        slot_tokens=shape.slot_tokens,
        head_dim=config.head_dim,
        dtype=shape.dtype,
    )


class CachedSlots:
    """The part of `StageCompute` that is about slots, for models whose keys and values lie in a `KvCache`."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self.reset_slot, self.copy_slot, self.trim_slot = cache.reset_slot, cache.copy_slot, cache.trim_slot


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
