"""Who holds which KV slot: the accounting behind admission. Pure.

A slot is one request's contiguous region of the cache; `global slot = cohort * slots_per_cohort + index`. A slot that
is given out again gets a new generation, and that is how a late row of its former holder is told apart. The lowest free
index goes first, so that the rows of a cohort lie close together and stages can read them as one view.
"""

import heapq


class SlotLedger:
    """Free and held slots of every cohort. Invariant: each slot is either free or held, never both."""

    def __init__(self, num_cohorts: int, slots_per_cohort: int, slot_tokens: int) -> None:
        self.num_cohorts = num_cohorts
        self.slots_per_cohort = slots_per_cohort
        self.slot_tokens = slot_tokens
        self._free = [list(range(slots_per_cohort)) for _ in range(num_cohorts)]
        self._generation = [0] * (num_cohorts * slots_per_cohort)
        self._reserved: dict[int, int] = {}

    @property
    def capacity_tokens(self) -> int:
        """Tokens the cache can hold."""
        return self.num_cohorts * self.slots_per_cohort * self.slot_tokens

    @property
    def reserved_tokens(self) -> int:
        """Tokens promised to requests that hold a slot."""
        return sum(self._reserved.values())

    @property
    def held_slots(self) -> int:
        """Slots in use."""
        return len(self._reserved)

    def held_in(self, cohort: int) -> int:
        """Slots in use in one cohort."""
        return self.slots_per_cohort - len(self._free[cohort])

    def lightest_cohort(self) -> int | None:
        """The cohort with the fewest held slots that still has a free one; None when all are full."""
        cohort = min(range(self.num_cohorts), key=self.held_in)
        return cohort if self._free[cohort] else None

    def take(self, cohort: int, tokens: int) -> tuple[int, int]:
        """Give out the lowest free slot of `cohort` for up to `tokens` tokens; returns (slot, generation)."""
        assert tokens <= self.slot_tokens, f"{tokens} tokens do not fit a slot of {self.slot_tokens}"
        slot = cohort * self.slots_per_cohort + heapq.heappop(self._free[cohort])
        self._generation[slot] += 1
        self._reserved[slot] = tokens
        return slot, self._generation[slot]

    def give_back(self, slot: int) -> None:
        """Free a held slot."""
        del self._reserved[slot]
        heapq.heappush(self._free[slot // self.slots_per_cohort], slot % self.slots_per_cohort)
