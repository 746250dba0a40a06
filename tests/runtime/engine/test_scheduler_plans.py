"""Exact plans of small cases: who runs when, what is sampled, and which feedback each plan waits for."""

import pytest

from oracles.simulated_pipeline import GREEDY, make_request
from stageline_runtime.engine.scheduling.row_selection import FirstRow
from stageline_runtime.engine.scheduling.scheduler import NewToken, Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, SlotBlocks, SlotFill, StepPlan
from stageline_runtime.plan_bus.step_plan import BusProtocolError, padded_size


def make_scheduler(num_cohorts: int = 1, slots: int = 2, budget: int = 8) -> Scheduler:
    return Scheduler(SlotLedger(num_cohorts, num_cohorts * slots, 64), max_step_tokens=budget, max_waiting=100)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def prefill(slot: int, generation: int, position: int, *tokens: int, sample: bool = True) -> PlanRow:
    return PlanRow(slot, generation, position, len(tokens), tokens, sample)


def decode(slot: int, generation: int, position: int) -> PlanRow:
    return PlanRow(slot, generation, position, 1, (), need_sample=True)


def feedback(plan: StepPlan) -> tuple[int, bool]:
    return plan.feedback_through, plan.feedback_posted


def test_one_request_of_three_tokens() -> None:
    """The prompt, one decode at once behind it, the last once a token is known; the last feeds nothing back."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", (1, 2, 3), 3))
    first = planned(scheduler)
    assert first == StepPlan(
        seq=0,
        cohort=0,
        fills=(SlotFill(0, 1, GREEDY),),
        rows=(prefill(0, 1, 0, 1, 2, 3),),
        padded_tokens=4,
        feedback_through=-1,
        feedback_posted=True,
        dummy=False,
        tables=(SlotBlocks(0, 0, (0,), are_new=True),),
    )
    second = planned(scheduler)
    assert (second.fills, second.rows, second.padded_tokens) == ((), (decode(0, 1, 3),), 1)
    assert feedback(second) == (0, True)
    assert scheduler.schedule() is None, "two samples are in flight"
    assert scheduler.complete(0, [SampledRow(0, 1, 50)]) == [NewToken("a", 50, finished=False, stopped=False)]
    third = planned(scheduler)
    assert third.rows == (decode(0, 1, 4),)
    assert feedback(third) == (1, False), "nothing will ever take the third token as input"
    assert scheduler.schedule() is None
    assert scheduler.complete(1, [SampledRow(0, 1, 51)]) == [NewToken("a", 51, finished=False, stopped=False)]
    assert scheduler.complete(2, [SampledRow(0, 1, 52)]) == [NewToken("a", 52, finished=True, stopped=False)]
    assert not scheduler.has_requests
    assert scheduler.ledger.held_slots == 0


def test_one_token_feeds_nothing_back() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", (1,), 1))
    plan = planned(scheduler)
    assert plan.sampled_rows == plan.rows
    assert feedback(plan) == (-1, False)
    assert scheduler.schedule() is None


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_is_sampled() -> None:
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_request("a", tuple(range(10)), 2))
    plans = [planned(scheduler) for _ in range(4)]
    assert [plan.rows for plan in plans] == [
        (prefill(0, 1, 0, 0, 1, 2, 3, sample=False),),
        (prefill(0, 1, 4, 4, 5, 6, 7, sample=False),),
        (prefill(0, 1, 8, 8, 9),),
        (decode(0, 1, 10),),
    ]
    assert [len(plan.fills) for plan in plans] == [1, 0, 0, 0]
    assert [feedback(plan) for plan in plans] == [(-1, False), (-1, False), (-1, True), (2, False)]
    assert scheduler.complete(0, []) == scheduler.complete(1, []) == []


def test_decodes_go_before_prefill_and_share_the_budget() -> None:
    scheduler = make_scheduler(budget=4)
    scheduler.add(make_request("a", (1, 2), 9))
    assert planned(scheduler).rows == (prefill(0, 1, 0, 1, 2),)
    scheduler.add(make_request("b", (3, 4, 5, 6, 7), 9))
    mixed = planned(scheduler)
    assert mixed.rows == (decode(0, 1, 2), prefill(1, 1, 0, 3, 4, 5, sample=False))
    assert mixed.fills == (SlotFill(1, 1, GREEDY),)
    assert feedback(mixed) == (0, True)
    assert planned(scheduler).rows == (prefill(1, 1, 3, 6, 7),), "a has two samples in flight"


def test_two_cohorts_take_turns() -> None:
    scheduler = make_scheduler(num_cohorts=2)
    scheduler.add(make_request("a", (1,), 9))
    scheduler.add(make_request("b", (2,), 9))
    plans = [planned(scheduler) for _ in range(4)]
    assert [(plan.cohort, plan.rows) for plan in plans] == [
        (0, (prefill(0, 1, 0, 1),)),
        (1, (prefill(1, 1, 0, 2),)),
        (0, (decode(0, 1, 1),)),
        (1, (decode(1, 1, 1),)),
    ]
    assert [plan.feedback_through for plan in plans] == [-1, -1, 0, 1]
    assert scheduler.schedule() is None


def test_a_cohort_with_nothing_to_run_is_passed_over() -> None:
    scheduler = make_scheduler(num_cohorts=3)
    scheduler.add(make_request("a", (1,), 9))
    assert [planned(scheduler).cohort for _ in range(2)] == [0, 0]


def test_a_burst_spreads_evenly() -> None:
    for num_cohorts in (1, 2, 3, 4):
        scheduler = make_scheduler(num_cohorts=num_cohorts, slots=16)
        for index in range(16):
            scheduler.add(make_request(str(index), (1,), 2))
        scheduler.schedule()
        sizes = scheduler.cohort_sizes()
        assert sum(sizes) == 16
        assert max(sizes) - min(sizes) <= 1, sizes


def test_requests_change_over_when_ends_leave_the_cohorts_uneven() -> None:
    """Six requests in two cohorts; all of cohort 0 end. One of cohort 1 joins it, once its newest token is known."""
    scheduler = make_scheduler(num_cohorts=2, slots=3, budget=64)
    for name in "abcdef":
        scheduler.add(make_request(name, (1,), 9))
    plans = [planned(scheduler), planned(scheduler)]
    assert [row.slot for plan in plans for row in plan.rows] == [0, 2, 4, 1, 3, 5]
    for name in "ace":
        assert scheduler.abort(name)
    assert scheduler.cohort_sizes() == (0, 3)
    third = planned(scheduler)
    assert scheduler.cohort_sizes() == (1, 2)
    rows = (decode(1, 1, 1), decode(3, 1, 1))
    assert (third.cohort, third.rows) == (1, rows), "cohort 0's newcomer has a token in flight"
    assert scheduler.schedule() is None
    scheduler.complete(0, [SampledRow(slot, 1, 50 + slot) for slot in (0, 2, 4)])
    scheduler.complete(1, [SampledRow(slot, 1, 50 + slot) for slot in (1, 3, 5)])
    fourth = planned(scheduler)
    assert (fourth.cohort, fourth.rows) == (0, (decode(5, 1, 1),)), "it keeps its slot"
    assert feedback(fourth) == (1, True)


def test_requests_wait_for_a_slot_in_order() -> None:
    scheduler = make_scheduler(slots=1)
    for name in "abc":
        scheduler.add(make_request(name, (1,), 1))
    planned(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    assert scheduler.complete(0, [SampledRow(0, 1, 9)])[0].request_id == "a"
    plan = planned(scheduler)
    assert plan.fills == (SlotFill(0, 2, GREEDY),), "the slot has a new generation"
    assert scheduler.complete(1, [SampledRow(0, 2, 9)])[0].request_id == "b"
    assert scheduler.abort("c")
    assert not scheduler.has_requests


def test_a_stop_token_ends_a_request_and_its_next_row_runs_dead() -> None:
    scheduler = make_scheduler(slots=1)
    scheduler.add(make_request("a", (1,), 9, stops=True))
    planned(scheduler)
    planned(scheduler)
    assert scheduler.complete(0, [SampledRow(0, 1, 7)]) == [NewToken("a", 7, finished=True, stopped=True)]
    scheduler.add(make_request("b", (2,), 9))
    assert planned(scheduler).fills == (SlotFill(0, 2, GREEDY),)
    assert scheduler.complete(1, [SampledRow(0, 1, 8)]) == [], "a's dead row is not b's token"
    assert scheduler.complete(2, [SampledRow(0, 2, 8)]) == [NewToken("b", 8, finished=False, stopped=False)]


@pytest.mark.parametrize("plans_before_abort", [0, 1, 2, 3])
def test_abort_in_every_state(plans_before_abort: int) -> None:
    """Waiting, mid-prompt, sampled, decoding: the slot is free at once and no token comes."""
    scheduler = make_scheduler(slots=1, budget=2)
    scheduler.add(make_request("a", (1, 2, 3, 4), 9))
    plans = [planned(scheduler) for _ in range(plans_before_abort)]
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert not scheduler.has_requests
    assert scheduler.ledger.held_slots == 0
    assert scheduler.schedule() is None
    for plan in plans:
        assert (
            scheduler.complete(plan.seq, [SampledRow(row.slot, row.generation, 5) for row in plan.sampled_rows]) == []
        )
    scheduler.add(make_request("a", (1,), 1))
    assert planned(scheduler).fills == (SlotFill(0, 2 if plans else 1, GREEDY),)


def test_a_request_aborted_between_admission_and_its_first_row_leaves_no_trace() -> None:
    """Its slot was given out but never filled; the next holder's generation is newer still."""
    scheduler = make_scheduler(slots=2, budget=1)
    scheduler.add(make_request("a", (1, 2), 9))
    scheduler.add(make_request("b", (3,), 9))
    assert planned(scheduler).rows == (prefill(0, 1, 0, 1, sample=False),)
    assert scheduler.abort("b")
    scheduler.add(make_request("c", (4,), 1))
    rows = [row for _ in range(3) if (plan := scheduler.schedule()) for row in plan.rows]
    assert [row for row in rows if row.slot == 1] == [prefill(1, 2, 0, 4)]


def test_plans_finish_in_order_or_a_stage_is_broken() -> None:
    scheduler = make_scheduler()
    scheduler.heartbeat()
    scheduler.heartbeat()
    with pytest.raises(BusProtocolError, match=r"StepDone\.seq is 1, but 0 is the next plan"):
        scheduler.complete(1, [])


def test_heartbeats_and_warm_up_carry_no_rows() -> None:
    scheduler = make_scheduler()
    warm_up, heartbeat = scheduler.warm_up(8), scheduler.heartbeat()
    assert (warm_up.dummy, warm_up.padded_tokens, warm_up.is_heartbeat) == (True, 8, False)
    assert (heartbeat.rows, heartbeat.padded_tokens, heartbeat.is_heartbeat) == ((), 1, True)
    assert (warm_up.seq, heartbeat.seq, scheduler.num_plans_in_flight) == (0, 1, 2)


def test_filled_requests_are_told_once() -> None:
    scheduler = make_scheduler(slots=4)
    scheduler.add(make_request("a", (1,), 2))
    scheduler.add(make_request("b", (1,), 2))
    planned(scheduler)
    assert scheduler.first_rows() == [FirstRow("a", 1, 0), FirstRow("b", 1, 0)]
    planned(scheduler)
    assert scheduler.first_rows() == []


def test_padded_sizes_are_few() -> None:
    assert [padded_size(tokens) for tokens in (1, 2, 3, 4, 5, 8, 9, 16, 17, 512)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 512]


def test_the_waiting_queue_is_bounded() -> None:
    scheduler = Scheduler(SlotLedger(1, 1, 8), max_step_tokens=8, max_waiting=1)
    scheduler.add(make_request("a", (1,), 2))
    assert (scheduler.can_add, scheduler.queue_room) == (False, 0)
    scheduler.schedule()
    assert (scheduler.can_add, scheduler.queue_room) == (True, 1)
