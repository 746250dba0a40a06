"""In whatever order requests come, go on, end, are aborted and lose their slots: every token comes once, to its own."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oracles.simulated_pipeline import SimulatedPipeline, expected_output, make_request
from stageline_runtime.engine.scheduling.request import MAX_DECODES_AHEAD, Request
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, padded_size

SLOT_TOKENS = 72
SHARED = tuple(index % 5 for index in range(64))
"""What prompts begin with, more or less of it, so that they share blocks."""

PROMPTS = st.builds(
    lambda shared, own: (*SHARED[:shared], *own),
    st.sampled_from([0, 0, 7, 16, 33, 40]),
    st.lists(st.integers(0, 22), min_size=1, max_size=20),
)


class SchedulerMachine(RuleBasedStateMachine):
    """The engine's loop with every event chosen: add, abort, plan, heartbeat, run, complete."""

    @initialize(
        num_cohorts=st.integers(1, 3),
        slots=st.integers(1, 3),
        budget=st.integers(1, 24),
        num_blocks=st.sampled_from([None, 5, 6, 8, 12]),
        prefix_cache=st.booleans(),
    )
    def start(self, num_cohorts: int, slots: int, budget: int, num_blocks: int | None, prefix_cache: bool) -> None:
        self.ledger = SlotLedger(num_cohorts, num_cohorts * slots, SLOT_TOKENS, num_blocks, prefix_cache=prefix_cache)
        self.budget = budget
        self.scheduler = Scheduler(self.ledger, max_step_tokens=budget, max_waiting=8)
        self.pipeline = SimulatedPipeline(num_cohorts * slots, num_blocks)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.live: list[str] = []
        self.next_seq = 0
        self.feedback_through = -1
        self.generations: dict[int, int] = {}
        self.in_flight: dict[tuple[int, int], int] = {}

    @precondition(lambda self: self.scheduler.can_add)
    @rule(
        prompt=PROMPTS,
        length=st.integers(1, 12),
        stops=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        resumed=st.integers(0, 5),
    )
    def add(self, prompt: tuple[int, ...], length: int, stops: bool, priority: int, resumed: int) -> None:
        name = f"request {len(self.requests)}"
        whole = expected_output(make_request(name, prompt, length, stops=stops))
        output = tuple(whole[: min(resumed, len(whole) - 1)])
        request = make_request(name, prompt, length, stops=stops, priority=priority, output=output)
        self.requests[name] = request
        self.outputs[name] = list(output)
        self.live.append(name)
        self.scheduler.add(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live))
        self.live.remove(name)
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        assert self.outputs[name] == expected_output(self.requests[name])[: len(self.outputs[name])]

    @rule()
    def schedule(self) -> None:
        before = self.scheduler.num_preemptions
        plan = self.scheduler.schedule()
        if plan is not None:
            if self.scheduler.num_preemptions == before:
                self.check_nobody_waits_behind(plan)
            self.check(plan)
            self.pipeline.send(plan)

    @rule()
    def heartbeat(self) -> None:
        plan = self.scheduler.heartbeat()
        assert plan.is_heartbeat
        self.check(plan)
        self.pipeline.send(plan)

    @precondition(lambda self: self.pipeline.sent)
    @rule()
    def run(self) -> None:
        self.pipeline.run_next()

    @precondition(lambda self: self.pipeline.results)
    @rule()
    def complete(self) -> None:
        seq, rows = self.pipeline.results.popleft()
        for row in rows:
            self.in_flight[row.slot, row.generation] -= 1
        for token in self.scheduler.complete(seq, rows):
            output = self.outputs[token.request_id]
            output.append(token.token)
            expected = expected_output(self.requests[token.request_id])
            assert token.request_id in self.live
            assert output == expected[: len(output)], f"{token.request_id}: {output} instead of {expected}"
            assert token.finished == (len(output) == len(expected))
            assert token.stopped == (token.token in self.requests[token.request_id].stop_token_ids)
            if token.finished:
                self.live.remove(token.request_id)

    def check_nobody_waits_behind(self, plan: StepPlan) -> None:
        """Two requests or more and no more than stages: what a plan begins to wait for lies P - 1 plans back."""
        stages, running = self.ledger.num_cohorts, self.scheduler.num_running
        between = plan.seq - plan.feedback_through - 1
        finished = plan.seq - self.scheduler.num_plans_in_flight
        if 1 < running <= stages and plan.feedback_through > max(self.feedback_through, finished):
            assert between >= stages - 1, f"{plan} of {running} requests over {stages} stages"

    def check(self, plan: StepPlan) -> None:
        assert plan.seq == self.next_seq
        self.next_seq += 1
        assert self.feedback_through <= plan.feedback_through < plan.seq
        self.feedback_through = plan.feedback_through
        assert plan.num_tokens <= self.budget
        assert plan.padded_tokens == max(1, padded_size(plan.num_tokens)) >= plan.num_tokens
        slots = [row.slot for row in plan.rows]
        assert slots == sorted(set(slots))
        sizes = self.scheduler.cohort_sizes()
        assert plan.is_heartbeat or max(sizes) - min(sizes) <= 1, sizes
        decodes = [row for row in plan.rows if not row.token_ids]
        assert len(decodes) <= -(-self.scheduler.num_running // len(sizes)), (plan, sizes)
        assert self.ledger.held_blocks + self.ledger.cached_blocks <= self.ledger.num_blocks
        for fill in plan.fills:
            assert fill.generation > self.generations.get(fill.slot, 0)
            self.generations[fill.slot] = fill.generation
            assert fill.cached_tokens % BLOCK_TOKENS == 0
        for row in plan.rows:
            self.check_row(row)
        for row in plan.sampled_rows:
            holder = (row.slot, row.generation)
            self.in_flight[holder] = self.in_flight.get(holder, 0) + 1
            assert self.in_flight[holder] <= MAX_DECODES_AHEAD, f"{plan.seq}: one more of {row}"

    def check_row(self, row: PlanRow) -> None:
        assert row.generation == self.generations[row.slot], f"a row of a slot never filled: {row}"
        assert row.num_tokens == (len(row.token_ids) or 1)
        assert row.position + row.num_tokens <= SLOT_TOKENS

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running = [request for request in self.requests.values() if request.request_id in self.live]
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.ledger.held_slots == self.scheduler.num_running == sum(self.scheduler.cohort_sizes())
        for request in running:
            assert 0 <= request.samples_in_flight <= MAX_DECODES_AHEAD
            assert request.samples_issued <= request.max_new_tokens

    def teardown(self) -> None:
        """Let everything finish: all live requests end with all their tokens and every slot is free."""
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while self.live or self.pipeline.sent or self.pipeline.results:
            self.schedule()
            if self.pipeline.sent:
                self.run()
            if self.pipeline.results:
                self.complete()
            steps += 1
            assert steps < 2000, f"no end in sight: {self.live}"
        for name, output in self.outputs.items():
            expected = expected_output(self.requests[name])
            assert output == expected[: len(output)]
        assert self.ledger.held_slots == 0
        assert self.ledger.held_blocks == 0
        assert self.scheduler.num_plans_in_flight == 0
        assert not self.scheduler.has_requests


SchedulerMachine.TestCase.settings = settings(stateful_step_count=60)
TestSchedulerKeepsEveryToken = SchedulerMachine.TestCase
