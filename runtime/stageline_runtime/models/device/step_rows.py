"""A plan's rows as the device's kernels read them: one small table of integers, sent in one copy.

The table's parts are found by position: tokens first, then tiles of single-token rows and padding, then tiles of
prefill chunks. Where a plan has nothing but single-token rows, tile `i` is token `i`: the table's layout then depends
on the padded size alone, which is what a captured graph needs.

Each stage pages its own cache, driven by plans alone. A slot takes a block when a row first writes into it and gives it
back when a plan trims the slot or fills it anew, so the blocks of all slots together never exceed what the engine
counts. All stages run the same plans in the same order, so none can run out before another. Blocks given back are used
again by later plans only, which the device runs later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.models.device.attention import DeviceRows
from stageline_runtime.plan_bus.messages import GraphMode, PlanRow
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of


class BlockTables:
    """Blocks `0..num_blocks-1` over slots of up to `slot_tokens` tokens."""

    def __init__(self, *, num_slots: int, slot_tokens: int, num_blocks: int) -> None:
        self.blocks_per_slot = blocks_of(slot_tokens)
        self.num_blocks = num_blocks
        self._of_slot: list[list[int]] = [[] for _ in range(num_slots)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._changes: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def of(self, slot: int) -> tuple[int, ...]:
        """The blocks of `slot` in order of position."""
        return tuple(self._of_slot[slot])

    def reserve(self, slot: int, end_tokens: int) -> None:
        """Make sure that `slot` has blocks for its first `end_tokens` positions.

        Raises:
            ValueError: no block is left; a bug in whoever planned it.
        """
        blocks = self._of_slot[slot]
        for index in range(len(blocks), blocks_of(end_tokens)):
            if not self._free:
                raise ValueError(f"slot {slot} needs a block for position {index * BLOCK_TOKENS}, but none is left")
            block = self._free.pop()
            blocks.append(block)
            self._changes.append((slot * self.blocks_per_slot + index, block))

    def trim(self, slot: int, num_tokens: int) -> None:
        """Give back what `slot` has behind its first `num_tokens` positions."""
        blocks = self._of_slot[slot]
        kept = blocks_of(num_tokens)
        self._free.extend(reversed(blocks[kept:]))
        del blocks[kept:]

    def copy(self, source: int, target: int, num_tokens: int) -> list[tuple[int, int]]:
        """Give `target`, which has none, blocks for `num_tokens` positions; returns (block to copy, its copy) pairs."""
        assert not self._of_slot[target], f"slot {target} has blocks already"
        held = self._of_slot[source]
        assert blocks_of(num_tokens) <= len(held), f"slot {source} holds fewer than {num_tokens} tokens"
        self.reserve(target, num_tokens)
        return list(zip(held, self._of_slot[target], strict=False))

    def take_changes(self) -> list[tuple[int, int]]:
        """(place in the flat table, block) of what `reserve` gave out since the last call."""
        changes, self._changes = self._changes, []
        return changes


PADDING_SLOT = -1
Token = tuple[int, int]
"""Slot and position."""
Tile = tuple[int, int, int, int]
"""First token, number of tokens, slot, position of the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBounds:
    """What rows are checked against, and how many tokens a prefill tile takes."""

    num_slots: int
    slot_tokens: int
    tile_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one plan, for tokens `[padded_tokens]` and tiles."""

    tokens: tuple[Token, ...]
    decode_tiles: tuple[Tile, ...]
    """Single-token rows and padding, in token order."""
    prefill_tiles: tuple[Tile, ...]
    graph_mode: GraphMode
    written: tuple[tuple[int, int], ...]
    """(slot, end position) of each row."""

    @classmethod
    def padding(cls, num_tokens: int, graph_mode: GraphMode) -> "StepRows":
        """The table of a plan of nothing but padding."""
        return cls(tokens=(), decode_tiles=(), prefill_tiles=(), graph_mode=graph_mode, written=()).padded_to(
            num_tokens
        )

    def with_padding_tile(self) -> "StepRows":
        """The same with a prefill tile that computes nothing."""
        return replace(self, prefill_tiles=(*self.prefill_tiles, (0, 1, PADDING_SLOT, 0)))

    @property
    def padded_tokens(self) -> int:
        return len(self.tokens)

    def padded_to(self, num_tokens: int) -> "StepRows":
        """The same rows with more padding, for a graph captured for `num_tokens`."""
        extra = range(self.padded_tokens, num_tokens)
        return StepRows(
            tokens=self.tokens + ((PADDING_SLOT, 0),) * len(extra),
            decode_tiles=self.decode_tiles + tuple((token, 1, PADDING_SLOT, 0) for token in extra),
            prefill_tiles=self.prefill_tiles,
            graph_mode=self.graph_mode,
            written=self.written,
        )

    def flat(self) -> list[int]:
        """All integers of the table in order."""
        parts: tuple[Sequence[tuple[int, ...]], ...] = (self.tokens, self.decode_tiles, self.prefill_tiles)
        return [number for part in parts for entry in part for number in entry]


def build_step_rows(
    rows: Sequence[PlanRow], padded_tokens: int, bounds: CacheBounds, graph_mode: GraphMode = GraphMode.OFF
) -> StepRows:
    """Work out the table of a plan.

    Raises:
        ValueError: a row lies outside the cache or the rows don't fit `padded_tokens`; a bug in whoever planned it.
    """
    tokens: list[Token] = []
    decode: list[Tile] = []
    prefill: list[Tile] = []
    for row in rows:
        _check_row(row, bounds)
        if row.num_tokens == 1:
            decode.append((len(tokens), 1, row.slot, row.position))
        else:
            prefill.extend(_tiles(row, len(tokens), bounds.tile_tokens))
        tokens.extend((row.slot, position) for position in range(row.position, row.position + row.num_tokens))
    if len(tokens) > padded_tokens:
        raise ValueError(f"rows need at least {len(tokens)} tokens, but the plan is padded to {padded_tokens}")
    filled = StepRows(
        tokens=tuple(tokens),
        decode_tiles=tuple(decode),
        prefill_tiles=tuple(prefill),
        graph_mode=graph_mode,
        written=tuple((row.slot, row.position + row.num_tokens) for row in rows),
    )
    return filled.padded_to(padded_tokens)


def _tiles(row: PlanRow, offset: int, tile_tokens: int) -> list[Tile]:
    return [
        (offset + start, min(tile_tokens, row.num_tokens - start), row.slot, row.position + start)
        for start in range(0, row.num_tokens, tile_tokens)
    ]


def _check_row(row: PlanRow, bounds: CacheBounds) -> None:
    if not 0 <= row.slot < bounds.num_slots:
        raise ValueError(f"slot {row.slot} is outside the cache's {bounds.num_slots} slots")
    if row.num_tokens < 1 or row.position < 0 or row.position + row.num_tokens > bounds.slot_tokens:
        raise ValueError(
            f"slot {row.slot}: {row.num_tokens} tokens at position {row.position} don't fit {bounds.slot_tokens}"
        )


_TOKEN, _TILE = 2, 4


class StepTable:
    """The device's copies of a plan's table and of the slots' block tables, for plans of up to `max_tokens` tokens.

    The buffers are made at load and filled by small copies. The host's side is pinned memory, given anew for each copy:
    torch keeps it until the copy out of it is done.
    """

    def __init__(self, accelerator: Accelerator, max_tokens: int, blocks: BlockTables, num_slots: int) -> None:
        # A token, a decode tile and, should chunks be short, a prefill tile for every two tokens.
        size = max_tokens * (_TOKEN + _TILE) + (max_tokens + 1) // 2 * _TILE
        self._accelerator = accelerator
        self._blocks = blocks
        self._table = torch.zeros(size, dtype=torch.int32, device=accelerator.device)
        # What no slot has yet, and what padding has, is the block behind the last.
        self._block_table = torch.full(
            (num_slots + 1, blocks.blocks_per_slot), blocks.num_blocks, dtype=torch.int32, device=accelerator.device
        )

    def fill(self, rows: StepRows) -> DeviceRows:
        """Queue the copy of a plan's table; what is returned views the one buffer, so it holds until the next plan."""
        for slot, end in rows.written:
            self._blocks.reserve(slot, end)
        changes = self._blocks.take_changes()
        if changes:
            places, blocks = self._accelerator.place(torch.tensor(changes, dtype=torch.int64)).unbind(1)
            self._block_table.view(-1)[places] = blocks.to(torch.int32)
        flat = torch.tensor(rows.flat(), dtype=torch.int32)
        staged = self._accelerator.pinned(tuple(flat.shape), flat.dtype).copy_(flat)
        self._accelerator.copy(self._table[: len(flat)], staged)
        return self.view(len(rows.tokens), len(rows.decode_tiles), len(rows.prefill_tiles))

    def view(self, num_tokens: int, num_decode_tiles: int, num_prefill_tiles: int = 0) -> DeviceRows:
        tokens_end = num_tokens * _TOKEN
        decode_end = tokens_end + num_decode_tiles * _TILE
        prefill_end = decode_end + num_prefill_tiles * _TILE
        return DeviceRows(
            tokens=self._table[:tokens_end].view(-1, _TOKEN),
            decode_tiles=self._table[tokens_end:decode_end].view(-1, _TILE),
            prefill_tiles=self._table[decode_end:prefill_end].view(-1, _TILE),
            block_table=self._block_table,
        )
