"""The real scheduler over stages that take a given time: how fast requests get their tokens, worked out.

Moments are computed, nothing waits. A stage takes `step_seconds`, and `token_seconds` for each padded token. Feedback
and hidden tensors cross between processes in no time; from the end of a plan to the plans that the engine makes of it
`engine_seconds` pass.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from oracles.simulated_pipeline import make_request
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, StepPlan
from stageline_runtime.speculation.speculation import Speculation

TOKEN = 0
"""All that is ever sampled: other drafts are wrong."""
PROMPT = (5,) * 16


@dataclass(slots=True)
class Answer:
    """One request's tokens as they reach the engine."""

    arrived: float
    moments: list[float] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> float:
        return self.moments[0] - self.arrived

    @property
    def tokens_per_second(self) -> float:
        """Between the first token and the last."""
        return (len(self.moments) - 1) / (self.moments[-1] - self.moments[0])


@dataclass(slots=True)
class TimedPipeline:
    num_stages: int
    step_seconds: float
    token_seconds: float
    speculation: Speculation | None = None
    engine_seconds: float = 0.0
    slots_per_cohort: int = 2
    max_step_tokens: int = 64
    prompt: tuple[int, ...] = PROMPT
    plans: list[StepPlan] = field(default_factory=list)
    """All that were made, in order."""
    _scheduler: Scheduler = field(init=False)
    _answers: list[Answer] = field(default_factory=list)
    _now: float = 0.0
    _num_events: int = 0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _queues: list[deque[StepPlan]] = field(default_factory=list)
    """Of each stage: what it computes, and after that what waits for it."""
    _held_up: deque[StepPlan] = field(default_factory=deque)
    """At the first stage, whose decode rows wait for feedback."""
    _sampled_through: int = -1
    _newest_positions: dict[tuple[int, int], int] = field(default_factory=dict)
    """By slot and generation."""

    def tokens_per_second(self, num_tokens: int, num_requests: int = 1) -> float:
        """Of requests that begin together, each between its first token and its last, on the average."""
        answers = self.run([(0.0, num_tokens)] * num_requests)
        return sum(answer.tokens_per_second for answer in answers) / num_requests

    def run(self, arrivals: list[tuple[float, int]]) -> list[Answer]:
        """Serve requests to their ends: `(moment, number of tokens)` of each."""
        self._queues = [deque() for _ in range(self.num_stages)]
        ledger = SlotLedger(
            self.num_stages,
            self.num_stages * self.slots_per_cohort,
            len(self.prompt) + max(count for _, count in arrivals),
        )
        self._scheduler = Scheduler(
            ledger, max_step_tokens=self.max_step_tokens, max_waiting=len(arrivals), speculation=self.speculation
        )
        self._answers = [Answer(moment) for moment, _ in arrivals]
        for number, (moment, num_tokens) in enumerate(arrivals):
            self._at(moment, partial(self._scheduler.add, make_request(str(number), self.prompt, num_tokens)))
        for moment, _ in arrivals:
            self._at(moment, self._pump)
        while self._events:
            self._now, _, act = heappop(self._events)
            act()
        came = [len(answer.moments) for answer in self._answers]
        assert came == [num_tokens for _, num_tokens in arrivals], came
        return self._answers

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heappush(self._events, (moment, self._num_events, act))

    def _pump(self) -> None:
        scheduler = self._scheduler
        while scheduler.num_plans_in_flight <= self.num_stages and (plan := scheduler.schedule()) is not None:
            self.plans.append(plan)
            self._held_up.append(plan)
        self._begin()

    def _begin(self) -> None:
        while self._held_up and self._has_inputs(self._held_up[0]):
            self._reach(0, self._held_up.popleft())

    def _has_inputs(self, plan: StepPlan) -> bool:
        return all(row.token_ids for row in plan.rows) or plan.feedback_through <= self._sampled_through

    def _reach(self, stage: int, plan: StepPlan) -> None:
        """The plan's input is at a stage, which begins it once it is done with those before."""
        self._queues[stage].append(plan)
        if len(self._queues[stage]) == 1:
            self._compute(stage)

    def _compute(self, stage: int) -> None:
        """A stage begins the first plan of its queue."""
        plan = self._queues[stage][0]
        seconds = self.step_seconds + self.token_seconds * plan.padded_tokens
        self._at(self._now + seconds, partial(self._leave, stage))

    def _leave(self, stage: int) -> None:
        """A stage is done with a plan, and hands it on before it begins the next."""
        plan = self._queues[stage].popleft()
        self._finish(plan) if stage == self.num_stages - 1 else self._reach(stage + 1, plan)
        if self._queues[stage]:
            self._compute(stage)

    def _finish(self, plan: StepPlan) -> None:
        self._sampled_through = plan.seq
        rows = [self._sample(row) for row in plan.sampled_rows]
        self._begin()
        self._at(self._now + self.engine_seconds, partial(self._account, plan, rows))

    def _account(self, plan: StepPlan, rows: list[SampledRow]) -> None:
        """The engine has the plan's tokens."""
        for token in self._scheduler.complete(plan.seq, rows):
            self._answers[int(token.request_id)].moments.append(self._now)
        self._pump()

    def _sample(self, row: PlanRow) -> SampledRow:
        drafts = row.token_ids[1:] if row.num_drafts else ()
        held = next((number for number, draft in enumerate(drafts) if draft != TOKEN), len(drafts))
        return self._sampled(row, TOKEN, TOKEN, held)

    def _sampled(self, row: PlanRow, newest: int, token: int, held: int) -> SampledRow:
        """`token` after so many drafts that hold; a verifying row begins with the `newest` token."""
        place, first = (row.slot, row.generation), row.position + row.num_tokens - row.num_drafts
        begins = not row.num_drafts or (row.position, row.token_ids[0]) == (self._newest_positions.get(place), newest)
        assert begins, f"{row} does not begin with the newest token"
        self._newest_positions[place] = first + held
        return SampledRow(row.slot, row.generation, token, num_sampled=held + 1)
