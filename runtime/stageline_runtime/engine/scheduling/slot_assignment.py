"""Assigns slots to waiting requests, and preempts the least senior one when the cache runs out. Pure.

Preemption is by recompute: a request that loses its slot queues again at its old place and later starts from all its
tokens, of which most may be cached. Its rows in flight become stale, since the slot's next holder has a new generation.
Rules, in which senior means a lower priority number, then an earlier arrival:

- The most senior waiting request gets the next slot. It needs blocks for all its inputs, and one more for each running
  request, so that no request soon loses its slot for a few missing tokens. It may take slots and blocks from requests
  of a lower priority, never from its own.
- A running request that needs one block more may take the slot of the least senior one, if that is less senior than
  itself; otherwise it waits until blocks are free.

So the most senior running request always progresses under any load: one request of any length always fits. Where ranks
have block pools of their own, a waiting request may start in any of them, and these rules hold within each.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from stageline_runtime.engine.scheduling.request import Request, WaitingQueue
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of


class Cohorts:
    """Which requests step together. Invariant: a running request is in exactly one cohort, the one it names.

    There are as many cohorts as stages; one plan carries decode rows of one cohort. A request joins the smallest
    cohort; among equals, the one with the earliest turn. When finished requests leave them uneven, requests move
    between cohorts, so that no plan carries more than `ceil(running / cohorts)` decode rows (an uneven pipeline
    waits for its largest cohort). Cohorts run round-robin; one with no rows to run is skipped.
    """

    def __init__(self, num_cohorts: int) -> None:
        self._members: list[list[Request]] = [[] for _ in range(num_cohorts)]
        self._next = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self._members))

    def members(self, cohort: int) -> list[Request]:
        """The cohort's requests, the most senior first."""
        return sorted(self._members[cohort], key=lambda request: request.seniority)

    def lightest(self) -> int:
        return min(self.turns(), key=self.sizes.__getitem__)

    def join(self, request: Request, cohort: int) -> None:
        request.cohort = cohort
        self._members[cohort].append(request)

    def leave(self, request: Request) -> None:
        self._members[request.cohort].remove(request)

    def even_out(self) -> None:
        """Move requests from the largest cohort to the smallest until their sizes differ by one at most.

        A request keeps its slot: cohorts group requests into steps, a slot locates the request's cache.
        """
        while True:
            largest, smallest = max(self._members, key=len), min(self._members, key=len)
            if len(largest) - len(smallest) < 2:
                return
            request = largest.pop()
            request.out_of_turn = True
            self.join(request, self._members.index(smallest))

    def turns(self) -> Iterator[int]:
        """All cohorts, starting with the one that has the next turn."""
        for offset in range(len(self._members)):
            yield (self._next + offset) % len(self._members)

    def took_turn(self, cohort: int) -> None:
        self._next = (cohort + 1) % len(self._members)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a waiting request may begin: with one of `ranks`, once `victims` have lost their slots."""

    ranks: Collection[int]
    victims: Collection[Request]


class SlotAssignment:
    """Requests that hold a slot, and those that wait for one."""

    def __init__(self, ledger: SlotLedger, *, has_draft_model: bool = False) -> None:
        """`has_draft_model`: which needs the ids of cached inputs, too."""
        self.ledger = ledger
        self.has_draft_model = has_draft_model
        self.waiting = WaitingQueue()
        self.cohorts = Cohorts(ledger.num_cohorts)
        self.running: dict[str, Request] = {}
        self.num_preemptions = 0
        self._by_row: dict[tuple[int, int], Request] = {}

    def request_in(self, slot: int, generation: int) -> Request | None:
        """The request that owns these rows; None when the slot was reassigned and they are stale."""
        return self._by_row.get((slot, generation))

    def admit(self) -> None:
        """Assign slots to waiting requests, the most senior first, as long as the next one fits."""
        while (request := self.waiting.first) is not None:
            place = self._place_for(request)
            if place is None:
                return
            for victim in place.victims:
                self._preempt(victim)
            self._admit(self.waiting.take_first(), place.ranks)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Let a running request grow to `num_tokens` tokens, preempting less senior ones if necessary."""
        while not self.ledger.grow(request.slot, num_tokens):
            victim = max(self._running_with(self.ledger.rank_of(request.slot)), key=lambda each: each.seniority)
            if victim is request:
                return False
            self._preempt(victim)  # frees nothing if it shares all its blocks: then the next one is preempted
        return True

    def grow_for_drafts(self, slot: int, num_tokens: int) -> bool:
        """Like `grow`, for tokens that may be discarded: only if every running request can still get one block more,
        so that drafts cost no request its slot."""
        ledger, rank = self.ledger, self.ledger.rank_of(slot)
        missing = blocks_of(num_tokens) - ledger.num_blocks_of(slot)
        if missing > 0 and ledger.available_blocks(rank) - missing < sum(1 for _ in self._running_with(rank)):
            return False
        return ledger.grow(slot, num_tokens)

    def release(self, request: Request) -> None:
        """Release the slot of a running request. Other requests can still use its cached content."""
        del self.running[request.request_id]
        del self._by_row[request.slot, request.generation]
        self.cohorts.leave(request)
        self.ledger.give_back(request.slot)

    def note_computed(self, request: Request) -> None:
        """Cache the blocks that existing plans fill, for requests with the same prefix."""
        if not self.ledger.caches_prefixes:
            return
        start, end = self.ledger.num_cached(request.slot) * BLOCK_TOKENS, request.known_computed_tokens
        full = range(start, end - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        if full:
            self.ledger.note_full(request.slot, [request.tokens(each, each + BLOCK_TOKENS) for each in full])

    def _running_with(self, rank: int) -> Iterator[Request]:
        return (each for each in self.running.values() if self.ledger.rank_of(each.slot) == rank)

    def _admit(self, request: Request, ranks: Collection[int]) -> None:
        request.slot, request.generation, request.scheduled_inputs = self.ledger.take(
            request.inputs, request.cache_salt, request.prefixes, reusable=request.reusable_inputs, ranks=ranks
        )
        self.running[request.request_id] = request
        self._by_row[request.slot, request.generation] = request
        self.cohorts.join(request, self.cohorts.lightest())

    def _preempt(self, request: Request) -> None:
        self.release(request)
        request.restart()
        self.waiting.add(request)
        self.num_preemptions += 1

    def _place_for(self, request: Request) -> "_Place | None":
        """All ranks that `request` fits into as they are, else the one that costs the fewest others their slots; None
        when it can't fit."""
        found = {rank: self._victims_for(request, rank) for rank in range(self.ledger.num_ranks)}
        fitting = {rank: victims for rank, victims in found.items() if victims is not None}
        if as_they_are := [rank for rank, victims in fitting.items() if not victims]:
            return _Place(as_they_are, [])
        rank = min(fitting, key=lambda each: len(fitting[each]), default=None)
        return None if rank is None else _Place([rank], fitting[rank])

    def _victims_for(self, request: Request, rank: int) -> list[Request] | None:
        """Requests to preempt so that `request` fits: the least senior of lower priorities; None when it can't fit."""
        ledger, running = self.ledger, list(self._running_with(rank))
        has_slot = ledger.has_free_slot(rank)
        lower = sorted((each for each in running if each.priority > request.priority), key=lambda each: each.seniority)
        victims: list[Request] = []
        while has_slot or lower:
            without = [victim.slot for victim in victims]
            kept = sum(self._headroom(each) for each in running if each.slot not in without)
            wanted = len(request.inputs), request.reusable_inputs, request.cache_salt
            if has_slot and ledger.spare_blocks(*wanted, rank, without) >= kept:
                return victims
            if not lower:
                return None
            victims.append(lower.pop())
            has_slot = True
        return None

    def _headroom(self, request: Request) -> int:
        """Blocks kept free for a running request to grow into: one, unless it has all it may ever need."""
        return int(blocks_of(request.most_inputs) > self.ledger.num_blocks_of(request.slot))
