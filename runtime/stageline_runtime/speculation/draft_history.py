"""What a draft model has computed of each slot, and what it must compute before it can draft. Pure.

The last stage sees every token of a request: inputs arrive in its rows, output is sampled there. The history stores
tokens by slot. For each block of the cache it stores how many positions the draft model has computed in it. So work for
one request serves all requests that share the block. If a token differs from the computed one at its place, the work
from that position on is discarded. Invariant: the keys of the first `computed` positions belong to the stored ids.

The draft model computes nothing until drafts are requested, and then computes all missing positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stageline_runtime.plan_bus.messages import BusProtocolError, SlotBlocks, SlotFill
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS


@dataclass(slots=True)
class _Slot:
    generation: int = -1
    ids: list[int] = field(default_factory=list)
    """Known ones, and behind them drafts that were computed."""
    known: int = 0
    blocks: list[int] = field(default_factory=list)
    whole: int = 0
    """How many of its first blocks are known to be computed whole."""


class DraftHistory:
    """Ids of every slot, and how far its draft keys go."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._filled: dict[int, int] = {}
        """By block: its first positions that have keys."""

    def change(self, change: SlotBlocks) -> None:
        """A slot's table changes. Once it is empty, its holder has it no longer."""
        one = self._slots[change.slot]
        one.blocks[change.start :] = change.blocks
        one.whole = min(one.whole, change.start)
        if not one.blocks:
            one.generation = -1
        if change.are_new:
            self._filled.update(dict.fromkeys(change.blocks, 0))

    def fill(self, fill: SlotFill) -> None:
        """A request takes a slot.

        Raises:
            BusProtocolError: it is not said which inputs are cached.
        """
        if len(fill.cached_token_ids) != fill.cached_tokens:
            said = f"{len(fill.cached_token_ids)} of {fill.cached_tokens}"
            raise BusProtocolError(f"SlotFill.cached_token_ids of slot {fill.slot}: {said} tokens are there")
        blocks = self._slots[fill.slot].blocks
        self._slots[fill.slot] = _Slot(fill.generation, list(fill.cached_token_ids), fill.cached_tokens, blocks)

    def is_current(self, slot: int, generation: int) -> bool:
        return self._slots[slot].generation == generation

    def take(self, slot: int, position: int, ids: Sequence[int]) -> None:
        """The request's tokens from `position` on are `ids`; those before are known."""
        one = self._slots[slot]
        if position > one.known:
            raise BusProtocolError(f"PlanRow.position of slot {slot} is {position}, but {one.known} tokens are known")
        self._write(slot, position, ids)
        one.known = position + len(ids)

    def computed(self, slot: int) -> int:
        """How many positions have keys."""
        one = self._slots[slot]
        while one.whole < len(one.blocks) and self._filled.get(one.blocks[one.whole], 0) == BLOCK_TOKENS:
            one.whole += 1
        rest = self._filled.get(one.blocks[one.whole], 0) if one.whole < len(one.blocks) else 0
        return min(one.whole * BLOCK_TOKENS + rest, len(one.ids))

    def pending(self, slot: int) -> tuple[int, list[int]]:
        """What has to be computed before the next token can be drafted: its position and ids, at least the newest."""
        one = self._slots[slot]
        start = min(self.computed(slot), one.known - 1)
        return start, one.ids[start : one.known]

    def compute(self, slot: int, position: int, ids: Sequence[int]) -> None:
        """The draft model computes `ids` at `position`: pending ones, or a draft behind the last."""
        computed = self.computed(slot)
        assert position <= computed, f"slot {slot}: {position} is computed, but only {computed} before it"
        self._write(slot, position, ids)
        end = position + len(ids)
        for start, block in self._parts(slot, position, end):
            self._filled[block] = max(self._filled.get(block, 0), min(BLOCK_TOKENS, end - start))

    def _write(self, slot: int, position: int, ids: Sequence[int]) -> None:
        one, computed = self._slots[slot], self.computed(slot)
        overlap = one.ids[position:computed]
        differing = (index for index, (old, new) in enumerate(zip(overlap, ids, strict=False)) if old != new)
        kept = position + next(differing, len(overlap))
        if kept < computed and kept < position + len(overlap):
            for start, block in self._parts(slot, kept, computed):
                self._filled[block] = min(self._filled.get(block, 0), max(0, kept - start))
            one.whole = min(one.whole, kept // BLOCK_TOKENS)
        one.ids[position : position + len(ids)] = ids

    def _parts(self, slot: int, position: int, end: int) -> list[tuple[int, int]]:
        """The first position and the number of each block that holds positions from `position` up to `end`."""
        first, last = position // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS
        blocks = self._slots[slot].blocks
        return [(index * BLOCK_TOKENS, blocks[index]) for index in range(first, last + 1)]
