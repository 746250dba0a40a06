"""Who runs: gives slots to waiting requests, and takes them from the least senior when cache runs out. Pure.

Preemption is by recompute: a request that loses its slot queues again at its old place and later starts from all tokens
it has; rows of it that are in flight run dead, because the slot's next holder has a new generation. Rules, in which
senior means a lower priority number, then an earlier arrival:

- The most senior waiting request gets the next slot. It needs blocks for all its inputs, and one more for each running
  request, so that nobody loses its slot again for want of a few tokens. It may take slots and blocks from requests of a
  lower priority, never from its own.
- A running request that needs one block more may take the slot of the least senior one, if that is less senior than
  itself; otherwise it stays where it is until blocks are free.

So the most senior running request always gets on, whatever the load: there is always room for one of any length.
"""

from stageline_runtime.engine.scheduling.cohorts import Cohorts
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.engine.scheduling.waiting_queue import WaitingQueue
from stageline_runtime.plan_bus.kv_blocks import BLOCK_TOKENS, blocks_of


class Holders:
    """Requests that hold a slot, those that wait for one, and what each slot is known to contain."""

    def __init__(self, ledger: SlotLedger) -> None:
        self.ledger = ledger
        self.waiting = WaitingQueue()
        self.cohorts = Cohorts(ledger.num_cohorts)
        self.running: dict[str, Request] = {}
        self.num_preemptions = 0
        self._by_row: dict[tuple[int, int], Request] = {}

    def holder(self, slot: int, generation: int) -> Request | None:
        """Whose rows these are; None when they run dead."""
        return self._by_row.get((slot, generation))

    def admit(self) -> None:
        """Give slots to waiting requests, the most senior first, as long as the next one fits."""
        while (request := self.waiting.first) is not None:
            victims = self._victims_for(request)
            if victims is None:
                return
            for victim in victims:
                self._preempt(victim)
            self._admit(self.waiting.take_first())

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Let a running request come to `num_tokens` tokens, at a less senior one's cost where it must be."""
        if self.ledger.grow(request.slot, num_tokens):
            return True
        victim = max(self.running.values(), key=lambda each: each.seniority)
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
            index.extend(request.slot, request.tokens(start, start + BLOCK_TOKENS))
            start += BLOCK_TOKENS

    def _admit(self, request: Request) -> None:
        cohort = self.cohorts.lightest()
        request.slot, request.generation, request.scheduled_inputs = self.ledger.take(cohort, request.inputs)
        self.running[request.request_id] = request
        self._by_row[request.slot, request.generation] = request
        self.cohorts.join(request, cohort)

    def _preempt(self, request: Request) -> None:
        self.release(request)
        request.restart()
        self.waiting.add(request)
        self.num_preemptions += 1

    def _victims_for(self, request: Request) -> list[Request] | None:
        """Who must lose its slot for `request` to fit: the least senior of lower priorities; None when it can't fit."""
        lower = [each for each in self.running.values() if each.priority > request.priority]
        has_slot = self.ledger.has_free_slot
        if not has_slot and not lower:
            return None
        missing = blocks_of(len(request.inputs)) - self.ledger.available_blocks
        missing += sum(map(self._headroom, self.running.values()))
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
