"""Little cache, many requests, shared beginnings: everyone ends with its own tokens, the most senior always gets on."""

from collections import Counter
from random import Random

import pytest

from oracles.simulated_pipeline import SimulatedPipeline, expected_output, make_request
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import StepPlan

SLOT_TOKENS = 96


class PressedEngine:
    """The engine's loop over a simulated pipeline, `run_ahead` plans ahead; counts what happens."""

    def __init__(self, random: Random, *, num_blocks: int, prefix_cache: bool, num_ranks: int) -> None:
        self.random = random
        self.num_cohorts, slots = random.randint(1, 3), random.randint(1, 4)
        num_slots = max(num_ranks, self.num_cohorts * slots)
        self.ledger = SlotLedger(
            self.num_cohorts, num_slots, SLOT_TOKENS, num_blocks, prefix_cache=prefix_cache, num_ranks=num_ranks
        )
        self.budget = random.choice((4, 16, 48))
        self.scheduler = Scheduler(self.ledger, max_step_tokens=self.budget, max_waiting=1000)
        self.pipeline = SimulatedPipeline(num_slots, num_blocks, num_ranks)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.seen: Counter[str] = Counter()

    def add(self) -> None:
        name = f"request {len(self.outputs)}"
        shared = tuple(index % 3 for index in range(self.random.choice((0, 16, 32, 50))))
        own = tuple(self.random.randrange(23) for _ in range(self.random.randint(1, 25)))
        stops, priority = self.random.random() < 0.3, self.random.choice((0, 0, 0, 1))
        request = make_request(name, shared + own, self.random.randint(1, 20), stops=stops, priority=priority)
        self.requests[name], self.outputs[name] = request, []
        self.expected[name] = expected_output(request)
        self.scheduler.add(request)

    def abort(self) -> None:
        name = self.random.choice(list(self.requests))
        if self.scheduler.abort(name):
            self.seen["abort"] += 1
            del self.requests[name]

    def plan(self) -> None:
        """Send what can be sent."""
        while self.scheduler.num_plans_in_flight <= self.num_cohorts and (plan := self.scheduler.schedule()):
            self.see(plan)
            self.pipeline.send(plan)
        self.seen["more than a rank holds"] += self.ledger.held_blocks > self.ledger.num_blocks / self.ledger.num_ranks

    def see(self, plan: StepPlan) -> None:
        for fill in plan.fills:
            self.seen["shared" if fill.cached_tokens else "nothing"] += 1
        self.seen["duplicate given up"] += any(each.start and not each.are_new for each in plan.tables)
        members = {(each.slot, each.generation): each.cohort for each in self.requests.values() if each.slot >= 0}
        self.seen["chunk out of turn"] += any(
            members.get((row.slot, row.generation), plan.cohort) != plan.cohort for row in plan.rows
        )

    def step(self) -> None:
        """Finish the oldest plan."""
        self.pipeline.run_next()
        for token in self.scheduler.complete(*self.pipeline.results.popleft()):
            output = self.outputs[token.request_id]
            output.append(token.token)
            expected = self.expected[token.request_id]
            assert output == expected[: len(output)], f"{token.request_id}: {output} instead of {expected}"
            if token.finished:
                assert output == expected
                del self.requests[token.request_id]

    def senior(self) -> Request | None:
        """Who must get on whatever happens."""
        return min(self.requests.values(), key=lambda request: request.seniority, default=None)


def drive(seed: int, *, prefix_cache: bool, num_blocks: int = 10, num_ranks: int = 1) -> Counter[str]:
    random = Random(seed)
    engine = PressedEngine(random, num_blocks=num_blocks, prefix_cache=prefix_cache, num_ranks=num_ranks)
    patience = 0
    last: tuple[str, int] | None = None
    to_come = 25
    while to_come or engine.requests:
        if to_come and random.random() < 0.3:
            to_come -= 1
            engine.add()
        if engine.requests and random.random() < 0.02:
            engine.abort()
        engine.plan()
        if engine.pipeline.sent:
            engine.step()
        else:
            assert not engine.requests, f"seed {seed}: nothing runs and nothing ever will: {engine.requests}"
        senior = engine.senior()
        now = None if senior is None else (senior.request_id, len(senior.output) * 1000 + senior.scheduled_inputs)
        patience = patience + 1 if now == last else 0
        last = now
        assert patience < 60, f"seed {seed}: {senior} does not get on"
    engine.seen["preemption"] += engine.scheduler.num_preemptions
    assert engine.ledger.held_blocks == engine.ledger.held_slots == 0
    return engine.seen


@pytest.mark.parametrize(
    "prefix_cache", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["cache", "no-cache"]
)
def test_everyone_ends_with_its_own_tokens(prefix_cache: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        seen += drive(seed, prefix_cache=prefix_cache)
    wanted = ["preemption", "abort", "chunk out of turn", "nothing"]
    wanted += ["shared", "duplicate given up"] if prefix_cache else []
    assert all(seen[what] >= 20 for what in wanted), f"the runs met too little of what they are for: {seen}"
    assert prefix_cache or not seen["shared"], seen


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_hold_more_together_than_one_and_none_more_than_its_own(num_ranks: int) -> None:
    """Each rank's memory is its own: whom a request keeps waiting, and whose slot it takes, is of the same rank."""
    seen: Counter[str] = Counter()
    for seed in range(80):
        seen += drive(seed, prefix_cache=True, num_blocks=7, num_ranks=num_ranks)
    wanted = ["preemption", "abort", "shared", "more than a rank holds"]
    assert all(seen[what] >= 20 for what in wanted), f"the runs met too little of what they are for: {seen}"
