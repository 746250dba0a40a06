"""What lies in the blocks of a cache, by the plans alone, and nothing that a cache in memory would silently allow: a
block in two tables as a new one, a place read that nobody wrote, or written twice.
"""

from collections.abc import Iterable, Sequence

from stageline_runtime.plan_bus.messages import SlotBlocks
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of


class PagedStore:
    def __init__(self, name: str, num_blocks: int | None = None) -> None:
        """`num_blocks` None: any number."""
        self._name = name
        self._num_blocks = num_blocks
        self.tables: dict[int, list[int]] = {}
        self._content: dict[tuple[int, int], int] = {}

    def change(self, changes: Iterable[SlotBlocks]) -> None:
        """Apply what a plan says of the tables."""
        for change in changes:
            table = self.tables.setdefault(change.slot, [])
            assert change.start <= len(table), f"{self._name}: {change} leaves a gap behind {table}"
            table[change.start :] = change.blocks
            assert len(set(table)) == len(table), f"{self._name}: {change} gives slot {change.slot} a block twice"
            if change.are_new:
                self._renew(change)

    def _renew(self, change: SlotBlocks) -> None:
        for block in change.blocks:
            assert self._num_blocks is None or 0 <= block < self._num_blocks, f"{self._name}: {change}"
            holders = [slot for slot, table in self.tables.items() if block in table]
            assert holders == [change.slot], f"{self._name}: new block {block} is in the tables of slots {holders}"
            for offset in range(BLOCK_TOKENS):
                self._content.pop((block, offset), None)

    def write(self, slot: int, position: int, values: Sequence[int], *, over: bool = False) -> None:
        """Write at the slot's positions from one on. `over`: others may lie there."""
        for at, value in enumerate(values, start=position):
            place = self._place(slot, at)
            assert over or place not in self._content, f"{self._name}: position {at} of slot {slot} is written twice"
            self._content[place] = value

    def forget(self, slot: int, position: int) -> None:
        """What lies at the slot's positions from one on is void."""
        for block in self.tables[slot][position // BLOCK_TOKENS :]:
            for offset in range(BLOCK_TOKENS):
                if self.tables[slot].index(block) * BLOCK_TOKENS + offset >= position:
                    self._content.pop((block, offset), None)

    def read(self, slot: int, end: int) -> list[int]:
        """What lies at the slot's positions up to `end`."""
        places = [self._place(slot, position) for position in range(end)]
        missing = [position for position, place in enumerate(places) if place not in self._content]
        assert not missing, f"{self._name}: nothing was written at positions {missing} of slot {slot}"
        return [self._content[place] for place in places]

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        table, part = self.tables.get(slot, []), position // BLOCK_TOKENS
        assert part < len(table), f"{self._name}: slot {slot} has no block for position {position}: {table}"
        return table[part], position % BLOCK_TOKENS


def own_blocks(num_slots: int, slot_tokens: int) -> tuple[SlotBlocks, ...]:
    """Tables of slots that share nothing: each has all its blocks, side by side."""
    width = blocks_of(slot_tokens)
    return tuple(
        SlotBlocks(slot, 0, tuple(range(slot * width, (slot + 1) * width)), are_new=True) for slot in range(num_slots)
    )
