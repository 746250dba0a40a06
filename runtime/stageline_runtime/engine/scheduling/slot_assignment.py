"""Which requests run: slots are given to waiting requests, and taken from the least senior when cache runs out. Pure.

Preemption is by recompute: a request that loses its slot queues again at its old place and later starts from all tokens
it has; rows of it that are in flight run dead, because the slot's next holder has a new generation. Rules, in which
senior means a lower priority number, then an earlier arrival:

- The most senior waiting request gets the next slot. It needs blocks for all its inputs, and one more for each running
  request, so that nobody loses its slot again for want of a few tokens. It may take slots and blocks from requests of a
  lower priority, never from its own.
- A running request that needs one block more may take the slot of the least senior one, if that is less senior than
  itself; otherwise it stays where it is until blocks are free.

So the most senior running request always gets on, whatever the load: there is always room for one of any length. Where
the cache has pools, a request that waits may begin in any of them, and all of this is so within each.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from stageline_runtime.engine.scheduling.request import Guess, Request, WaitingQueue
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of


class Cohorts:
    """Which requests step together. Invariant: a running request is in exactly one cohort, the one it names.

    There are as many cohorts as stages; one plan carries decode rows of one cohort. A request joins the lightest one,
    of equals the one whose turn comes first; when ends leave them uneven, requests change over, so that no plan carries
    more than `ceil(running / cohorts)` decode rows (an uneven pipeline waits for its largest cohort). Cohorts take
    turns; one with nothing to run is passed over.
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

        A request keeps its slot: a cohort is who runs together, a slot is where its cache lies.
        """
        while True:
            largest, smallest = max(self._members, key=len), min(self._members, key=len)
            if len(largest) - len(smallest) < 2:
                return
            request = largest.pop()
            request.out_of_turn = True
            self.join(request, self._members.index(smallest))

    def turns(self) -> Iterator[int]:
        """All cohorts, whose turn it is first."""
        for offset in range(len(self._members)):
            yield (self._next + offset) % len(self._members)

    def took_turn(self, cohort: int) -> None:
        self._next = (cohort + 1) % len(self._members)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a waiting request may begin: in one of `pools`, once `victims` have lost their slots."""

    pools: Collection[int]
    victims: Collection[Request]


class SlotAssignment:
    """Requests that hold a slot, those that wait for one, and what each slot is known to contain."""

    def __init__(self, ledger: SlotLedger) -> None:
        self.ledger = ledger
        self.waiting = WaitingQueue()
        self.cohorts = Cohorts(ledger.num_cohorts)
        self.running: dict[str, Request] = {}
        self.num_preemptions = 0
        self._needless: list[Guess] = []
        self._by_row: dict[tuple[int, int], Request] = {}

    def request_in(self, slot: int, generation: int) -> Request | None:
        """Whose rows these are; None when the slot has passed on and they run dead."""
        return self._by_row.get((slot, generation))

    def admit(self) -> None:
        """Give slots to waiting requests, the most senior first, as long as the next one fits."""
        while (request := self.waiting.first) is not None:
            place = self._place_for(request)
            if place is None:
                return
            for victim in place.victims:
                self._preempt(victim)
            self._admit(self.waiting.take_first(), place.pools)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Let a running request come to `num_tokens` tokens, at a less senior one's cost where it must be."""
        if self.ledger.grow(request.slot, num_tokens):
            return True
        victim = max(self._running_in(self.ledger.pool_of(request.slot)), key=lambda each: each.seniority)
        if victim is request:
            return False
        self._preempt(victim)
        return self.ledger.grow(request.slot, num_tokens)

    def release(self, request: Request) -> None:
        """Take the slot of a running request away. Its content stays of use to others."""
        del self.running[request.request_id]
        del self._by_row[request.slot, request.generation]
        self.cohorts.leave(request)
        self.ledger.give_back(request.slot)

    def note_computed(self, request: Request) -> None:
        """Index the blocks that plans made so far complete, for those who may begin with them."""
        index = self.ledger.prefixes
        if index is None:
            return
        start = index.num_blocks(request.slot) * BLOCK_TOKENS
        while start + BLOCK_TOKENS <= request.known_computed_tokens:
            index.extend(request.slot, request.tokens(start, start + BLOCK_TOKENS), request.cache_salt)
            start += BLOCK_TOKENS

    def _running_in(self, pool: int) -> Iterator[Request]:
        return (each for each in self.running.values() if self.ledger.pool_of(each.slot) == pool)

    def _admit(self, request: Request, pools: Collection[int]) -> None:
        cohort = self.cohorts.lightest()
        request.slot, request.generation, request.scheduled_inputs = self.ledger.take(
            cohort, request.inputs, request.cache_salt, request.prefixes, reusable=request.reusable_inputs, pools=pools
        )
        self.running[request.request_id] = request
        self._by_row[request.slot, request.generation] = request
        self.cohorts.join(request, cohort)

    def take_needless(self) -> list[Guess]:
        """Guesses in flight of requests that lost their slots since the last call: nobody waits for them."""
        needless, self._needless = self._needless, []
        return needless

    def _preempt(self, request: Request) -> None:
        self._needless += request.leave_chain()
        self.release(request)
        request.restart()
        self.waiting.add(request)
        self.num_preemptions += 1

    def _place_for(self, request: Request) -> "_Place | None":
        """All pools that `request` fits into as they are, else the one that costs the fewest others their slots; None
        when it can't fit."""
        found = {pool: self._victims_for(request, pool) for pool in range(self.ledger.num_pools)}
        fitting = {pool: victims for pool, victims in found.items() if victims is not None}
        if as_they_are := [pool for pool, victims in fitting.items() if not victims]:
            return _Place(as_they_are, [])
        pool = min(fitting, key=lambda each: len(fitting[each]), default=None)
        return None if pool is None else _Place([pool], fitting[pool])

    def _victims_for(self, request: Request, pool: int) -> list[Request] | None:
        """Whom to preempt for `request` to fit there: the least senior of lower priorities; None when it can't fit."""
        running = list(self._running_in(pool))
        lower = [each for each in running if each.priority > request.priority]
        has_slot = self.ledger.has_free_slot(pool)
        if not has_slot and not lower:
            return None
        missing = blocks_of(len(request.inputs)) - self.ledger.available_blocks(pool)
        missing += sum(map(self._headroom, running))
        lower.sort(key=lambda each: each.seniority)
        victims: list[Request] = []
        while missing > 0 or not has_slot:
            if not lower:
                return None
            victims.append(victim := lower.pop())
            missing -= self.ledger.held_by(victim.slot) + self._headroom(victim)
            has_slot = True
        return victims

    def _headroom(self, request: Request) -> int:
        """Blocks kept free for a running request to grow into: one, unless it has all it may ever need."""
        return min(1, blocks_of(request.most_inputs) - self.ledger.held_by(request.slot))
