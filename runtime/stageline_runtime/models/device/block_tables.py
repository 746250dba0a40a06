"""Which blocks of the device's cache each slot has: a stage's own paging, driven by plans alone. Pure.

A slot takes a block when a row first writes into it and gives it back when a plan trims the slot or fills it anew, so
the blocks of all slots together never exceed what the engine counts. All stages run the same plans in the same order,
so none can run out before another. Blocks given back are used again by later plans only, which the device runs later.
"""

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
        """Blocks that no slot has."""
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
