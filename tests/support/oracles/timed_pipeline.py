"""The real scheduler over stages that take a given time: how fast requests get their tokens, worked out.

Moments are computed, nothing waits. A stage takes `step_seconds`, and `token_seconds` for each padded token; what
crosses between processes takes no time. A plan that is cancelled before a stage begins it takes none there.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from oracles.simulated_pipeline import make_request
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, StepPlan
from stageline_runtime.speculation.request_drafts import Speculation

TOKEN = 0
"""All that is ever sampled: other drafts are wrong."""
PROMPT = (5,) * 16


@dataclass(slots=True)
class TimedPipeline:
    num_stages: int
    step_seconds: float
    token_seconds: float
    speculation: Speculation | None = None
    _now: float = 0.0
    _num_events: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _free_at: list[float] = field(default_factory=list)
    _held_up: deque[StepPlan] = field(default_factory=deque)
    """At the first stage, whose decode rows wait for feedback."""
    _sampled_through: int = -1
    _newest_positions: dict[tuple[int, int], int] = field(default_factory=dict)
    """By slot and generation."""
    _cancelled: set[int] = field(default_factory=set)
    _arrivals: dict[str, list[float]] = field(default_factory=dict)
    """Of each request's tokens at the engine."""

    def tokens_per_second(self, num_tokens: int, num_requests: int = 1) -> float:
        """Of requests that begin together, each between its first token and its last, on the average."""
        self._free_at = [0.0] * self.num_stages
        ledger = SlotLedger(self.num_stages, 2, len(PROMPT) + num_tokens)
        scheduler = Scheduler(ledger, max_step_tokens=64, max_waiting=num_requests, speculation=self.speculation)
        for number in range(num_requests):
            scheduler.add(make_request(f"r{number}", PROMPT, num_tokens))
        self._pump(scheduler)
        while self._events:
            self._now, _, act = heappop(self._events)
            act()
        came = self._arrivals.values()
        assert [len(moments) for moments in came] == [num_tokens] * num_requests, self._arrivals
        return sum((num_tokens - 1) / (moments[-1] - moments[0]) for moments in came) / num_requests

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (moment, self._num_events, act))

    def _pump(self, scheduler: Scheduler) -> None:
        while scheduler.num_plans_in_flight <= self.num_stages and (plan := scheduler.schedule()) is not None:
            self._held_up.append(plan)
        while self._held_up and self._has_inputs(self._held_up[0]):
            self._reach(scheduler, 0, self._held_up.popleft())

    def _has_inputs(self, plan: StepPlan) -> bool:
        return all(row.token_ids for row in plan.rows) or plan.feedback_through <= self._sampled_through

    def _reach(self, scheduler: Scheduler, stage: int, plan: StepPlan) -> None:
        """The plan's input is at a stage, which begins it once it is done with those before."""
        begin = max(self._now, self._free_at[stage])
        seconds = self.step_seconds + self.token_seconds * plan.padded_tokens
        self._free_at[stage] = begin + seconds

        def run() -> None:
            took = 0.0 if plan.seq in self._cancelled else seconds
            is_last = stage == self.num_stages - 1
            next_one = self._finish if is_last else lambda of, done: self._reach(of, stage + 1, done)
            self._at(self._now + took, lambda: next_one(scheduler, plan))

        self._at(begin, run)

    def _finish(self, scheduler: Scheduler, plan: StepPlan) -> None:
        self._sampled_through = plan.seq
        tokens = scheduler.complete(plan.seq, [self._sample(row) for row in plan.sampled_rows])
        self._cancelled.update(scheduler.take_cancelled())
        for token in tokens:
            self._arrivals.setdefault(token.request_id, []).append(self._now)
        self._pump(scheduler)

    def _sample(self, row: PlanRow) -> SampledRow:
        place = (row.slot, row.generation)
        if row.num_drafts and (row.position, row.token_ids[0]) != (self._newest_positions.get(place), TOKEN):
            return SampledRow(row.slot, row.generation, TOKEN, num_sampled=0, num_rejected=row.num_drafts)
        drafts = row.token_ids[1:] if row.num_drafts else ()
        held = next((number for number, draft in enumerate(drafts) if draft != TOKEN), len(drafts))
        self._newest_positions[place] = row.position + row.num_tokens - row.num_drafts + held
        return SampledRow(row.slot, row.generation, TOKEN, num_sampled=held + 1, num_rejected=row.num_drafts - held)
