"""What a draft model has computed of each slot, and what it has yet to compute before it can draft. Pure.

The last stage sees every token of a request: inputs come in its rows, output is sampled there. It keeps them by slot,
as the cache keeps keys and values, with how many of them the draft model has computed. A token that turns out to be
another than the one computed at its place takes back what was computed from there on, so neither preemption nor a
rejected draft needs to be told. Invariant: the keys of the first `computed` positions are those of the ids that stand
there.

The draft model computes nothing until drafts are wanted, and then what it has missed: a request that never drafts
costs nothing but its ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Slot:
    generation: int = -1
    ids: list[int] = field(default_factory=list)
    """Known ones, and behind them drafts that were computed."""
    known: int = 0
    computed: int = 0

    def write(self, position: int, ids: Sequence[int]) -> None:
        overlap = self.ids[position : self.computed]
        for index, (old, new) in enumerate(zip(overlap, ids, strict=False)):
            if old != new:
                self.computed = position + index
                break
        self.ids[position : position + len(ids)] = ids


class DraftHistory:
    """Ids of every slot, and how far its draft keys go."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]

    def fill(self, slot: int, generation: int, copy_from: int | None, cached_tokens: int) -> int:
        """A request takes a slot, with its first `cached_tokens` from `copy_from` (None: the slot itself).

        Returns how many positions the draft model has computed of these: so many keys are kept, or copied.
        """
        source = self._slots[slot if copy_from is None else copy_from]
        computed = min(source.computed, cached_tokens)
        assert source.known >= cached_tokens, f"slot {copy_from} holds {source.known} of {cached_tokens} tokens"
        self._slots[slot] = _Slot(generation, source.ids[:cached_tokens], cached_tokens, computed)
        return computed

    def trim(self, slot: int, num_tokens: int) -> None:
        """The keys from position `num_tokens` on are given up."""
        self._slots[slot].computed = min(self._slots[slot].computed, num_tokens)

    def is_current(self, slot: int, generation: int) -> bool:
        return self._slots[slot].generation == generation

    def take(self, slot: int, position: int, ids: Sequence[int]) -> None:
        """The request's tokens from `position` on are `ids`; those before are known."""
        one = self._slots[slot]
        assert position <= one.known, f"slot {slot}: tokens from {position} on, but {one.known} are known"
        one.write(position, ids)
        one.known = position + len(ids)

    def computed(self, slot: int) -> int:
        """How many positions have keys."""
        return self._slots[slot].computed

    def pending(self, slot: int) -> tuple[int, list[int]]:
        """What has to be computed before the next token can be drafted: its position and ids, at least the newest."""
        one = self._slots[slot]
        start = min(one.computed, one.known - 1)
        return start, one.ids[start : one.known]

    def compute(self, slot: int, position: int, ids: Sequence[int]) -> None:
        """The draft model computes `ids` at `position`: pending ones, or a draft behind the last."""
        one = self._slots[slot]
        assert position <= one.computed, f"slot {slot}: {position} is computed, but only {one.computed} before it"
        one.write(position, ids)
        one.computed = position + len(ids)
