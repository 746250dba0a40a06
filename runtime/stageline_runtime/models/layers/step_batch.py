"""A plan's rows as attention reads them: one small table of integers, the same on every stage and device.

The table's sections are found by position: tokens first, then tiles of single-token rows and padding, how the contexts
of these are split, then tiles of prefill chunks. If a plan has only single-token rows, tile `i` is token `i`: the
table's layout then depends on the padded size alone, as a captured graph needs.

A second table holds the blocks (`BlockTable`): where in the cache each part of each slot is. The engine allocates
blocks, and plans carry the changes, so a stage decides nothing. Only later plans reuse a released block, and they run
later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import ComputeDevice
from stageline_runtime.plan_bus.messages import BusProtocolError, GraphMode, PlanRow, SlotBlocks
from stageline_runtime.plan_bus.step_plan import blocks_of

PADDING_SLOT = -1
Token = tuple[int, int]
"""Slot and position."""
Tile = tuple[int, int, int, int]
"""First token, number of tokens, slot, position of the first token."""
Part = tuple[int, int]
"""Spare parts of the decode tiles before this one, and positions in a part."""
_TOKEN, _TILE, _PART = 2, 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How attention wants a plan's rows cut."""

    tile_tokens: int = 1 << 30
    """Most tokens of a prefill tile."""
    spare_parts: int = 0
    """Parts of contexts beyond one for each row; 0: contexts are not split."""
    least_part_tokens: int = 1


WHOLE_CHUNKS = Tiling()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBounds:
    """What rows are checked against, and how they are cut."""

    num_slots: int
    slot_tokens: int
    tiling: Tiling = WHOLE_CHUNKS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The rows of one plan, for tokens `[padded_tokens]` and tiles."""

    tokens: tuple[Token, ...]
    decode_tiles: tuple[Tile, ...]
    """Single-token rows and padding, in token order."""
    prefill_tiles: tuple[Tile, ...]
    part_tokens: int
    """Positions of a decode row's context that one program reads; 0: all. It follows from the plan's rows alone, not
    from their order or the padding, so that a captured launch and an eager one add up alike."""
    graph_mode: GraphMode

    @classmethod
    def padding(cls, num_tokens: int, graph_mode: GraphMode, bounds: BatchBounds) -> "StepBatch":
        """The batch of a plan of nothing but padding."""
        return build_step_batch((), num_tokens, bounds, graph_mode)

    def with_padding_tile(self) -> "StepBatch":
        """The same with a prefill tile that computes nothing."""
        return replace(self, prefill_tiles=(*self.prefill_tiles, (0, 1, PADDING_SLOT, 0)))

    @property
    def padded_tokens(self) -> int:
        return len(self.tokens)

    @property
    def decode_parts(self) -> tuple[Part, ...]:
        """Each decode tile has one part and, where its context is longer than that, spare ones."""
        if not self.part_tokens or not self.decode_tiles:
            return ()
        spare = [position // self.part_tokens for _, _, _, position in self.decode_tiles]
        return tuple((before, self.part_tokens) for before in accumulate(spare[:-1], initial=0))

    def padded_to(self, num_tokens: int) -> "StepBatch":
        """The same rows with more padding, for a graph captured for `num_tokens`."""
        extra = range(self.padded_tokens, num_tokens)
        return replace(
            self,
            tokens=self.tokens + ((PADDING_SLOT, 0),) * len(extra),
            decode_tiles=self.decode_tiles + tuple((token, 1, PADDING_SLOT, 0) for token in extra),
        )

    def flat(self) -> list[int]:
        """All integers of the table in order."""
        sections: tuple[Sequence[tuple[int, ...]], ...] = (
            self.tokens,
            self.decode_tiles,
            self.decode_parts,
            self.prefill_tiles,
        )
        return [number for section in sections for entry in section for number in entry]


def build_step_batch(
    rows: Sequence[PlanRow], padded_tokens: int, bounds: BatchBounds, graph_mode: GraphMode = GraphMode.OFF
) -> StepBatch:
    """Work out the table of a plan.

    Raises:
        BusProtocolError: a row lies outside its slot or the rows don't fit `padded_tokens`.
    """
    tokens: list[Token] = []
    decode: list[Tile] = []
    prefill: list[Tile] = []
    for row in rows:
        slot, position, count = row.slot, row.position, row.num_tokens
        if not 0 <= slot < bounds.num_slots:
            raise BusProtocolError(f"PlanRow.slot is {slot}, of {bounds.num_slots} slots")
        if count < 1 or position < 0 or position + count > bounds.slot_tokens:
            raise BusProtocolError(
                f"PlanRow of slot {slot}: {count} tokens at position {position} don't fit {bounds.slot_tokens}"
            )
        if count == 1:
            decode.append((len(tokens), 1, slot, position))
            tokens.append((slot, position))
        else:
            prefill.extend(_tiles(row, len(tokens), bounds.tiling.tile_tokens))
            tokens.extend((slot, each) for each in range(position, position + count))
    if len(tokens) > padded_tokens:
        raise BusProtocolError(f"StepPlan.padded_tokens is {padded_tokens}, but its rows have {len(tokens)} tokens")
    filled = StepBatch(
        tokens=tuple(tokens),
        decode_tiles=tuple(decode),
        prefill_tiles=tuple(prefill),
        part_tokens=_part_tokens(decode, bounds.tiling),
        graph_mode=graph_mode,
    )
    return filled.padded_to(padded_tokens)


def _tiles(row: PlanRow, offset: int, tile_tokens: int) -> list[Tile]:
    return [
        (offset + start, min(tile_tokens, row.num_tokens - start), row.slot, row.position + start)
        for start in range(0, row.num_tokens, tile_tokens)
    ]


def _part_tokens(decode: Sequence[Tile], tiling: Tiling) -> int:
    """The smallest parts of which there are no more spare ones than that: all rows share them by their length."""
    if not tiling.spare_parts:
        return 0
    total = sum(position + 1 for _, _, _, position in decode)
    return max(tiling.least_part_tokens, next_power_of_two(-(-total // tiling.spare_parts)))


def next_power_of_two(number: int) -> int:
    """The smallest that holds `number`: Triton's blocks have such sizes."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """A plan's table where attention runs: all int32."""

    tokens: torch.Tensor
    """`[padded_tokens, 2]`: slot (-1 for padding) and position."""
    decode_tiles: torch.Tensor
    """`[num_tiles, 4]`: single-token rows and padding."""
    decode_parts: torch.Tensor
    """`[num_tiles, 2]`: for each decode tile, spare parts of the tiles before it, and positions in a part; or empty."""
    prefill_tiles: torch.Tensor
    """`[num_tiles, 4]`."""
    block_table: torch.Tensor
    """`[num_slots + 1, blocks_per_slot]`: the block of each part of each slot. The last row, which slot -1 reads, names
    a block that is no slot's."""


class BlockTable:
    """Which block holds each part of each slot, as plans say."""

    def __init__(self, *, num_slots: int, slot_tokens: int, num_blocks: int, device: ComputeDevice = HOST) -> None:
        self._device = device
        self._num_slots, self._num_blocks = num_slots, num_blocks
        self._width = blocks_of(slot_tokens)
        # What no slot has, and what padding has, is the block behind the last.
        self.tensor = torch.full((num_slots + 1, self._width), num_blocks, dtype=torch.int32, device=device.device)
        self._lengths = [0] * num_slots

    def change(self, changes: Iterable[SlotBlocks]) -> None:
        """Apply a plan's changes, before its rows are looked up.

        Raises:
            BusProtocolError: a change lies outside the table or names a block that isn't there.
        """
        places: list[int] = []
        blocks: list[int] = []
        for change in changes:
            end = change.start + len(change.blocks)
            if not 0 <= change.slot < self._num_slots or not 0 <= change.start <= end <= self._width:
                raise BusProtocolError(
                    f"SlotBlocks of slot {change.slot}, parts {change.start} to {end}, of {self._num_slots} slots of "
                    f"{self._width} parts"
                )
            if any(not 0 <= block < self._num_blocks for block in change.blocks):
                raise BusProtocolError(f"SlotBlocks.blocks of slot {change.slot} is {change.blocks}: not all are there")
            given_up = max(0, self._lengths[change.slot] - end)
            self._lengths[change.slot] = end
            first = change.slot * self._width + change.start
            places += range(first, first + len(change.blocks) + given_up)
            blocks += (*change.blocks, *(self._num_blocks,) * given_up)
        if places:
            # Of a part that changes twice the last one counts; a device may write both in any order.
            newest = self._device.place(torch.tensor([*dict(zip(places, blocks, strict=True)).items()]))
            self.tensor.view(-1)[newest[:, 0]] = newest[:, 1].to(torch.int32)

    def check(self, rows: Iterable[PlanRow]) -> None:
        """Raises BusProtocolError where a row lies behind the blocks of its slot, or outside of all slots."""
        for row in rows:
            end = row.position + row.num_tokens
            if not 0 <= row.slot < self._num_slots or blocks_of(end) > self._lengths[row.slot]:
                held = self._lengths[row.slot] if 0 <= row.slot < self._num_slots else 0
                raise BusProtocolError(f"PlanRow of slot {row.slot} ends at {end}, but the slot has {held} blocks")


class StepTable:
    """Where the plans' tables are put, for plans of up to `max_tokens` tokens.

    The buffer is made at load and filled by one small copy.
    """

    def __init__(self, max_tokens: int, blocks: BlockTable, device: ComputeDevice = HOST) -> None:
        # A token, a decode tile with its part and, should chunks be short, a prefill tile for every two tokens.
        size = max_tokens * (_TOKEN + _TILE + _PART) + (max_tokens + 1) // 2 * _TILE
        self._device = device
        self._blocks = blocks
        self._table = torch.zeros(size, dtype=torch.int32, device=device.device)

    def fill(self, batch: StepBatch) -> StepTensors:
        """Copy a plan's table there; the result is a view of the one buffer, valid until the next plan."""
        flat = torch.tensor(batch.flat(), dtype=torch.int32)
        self._device.fill(self._table[: len(flat)], flat)
        num_tiles = len(batch.decode_tiles)
        num_parts = num_tiles if batch.part_tokens else 0
        return self.view(len(batch.tokens), num_tiles, num_parts, len(batch.prefill_tiles))

    def view(self, num_tokens: int, num_decode_tiles: int, num_parts: int, num_prefill_tiles: int = 0) -> StepTensors:
        tokens_end = num_tokens * _TOKEN
        decode_end = tokens_end + num_decode_tiles * _TILE
        parts_end = decode_end + num_parts * _PART
        prefill_end = parts_end + num_prefill_tiles * _TILE
        return StepTensors(
            tokens=self._table[:tokens_end].view(-1, _TOKEN),
            decode_tiles=self._table[tokens_end:decode_end].view(-1, _TILE),
            decode_parts=self._table[decode_end:parts_end].view(-1, _PART),
            prefill_tiles=self._table[parts_end:prefill_end].view(-1, _TILE),
            block_table=self._blocks.tensor,
        )
