"""Exact states of who goes first: decodes that are held back, newcomers in the next turn and in passing plans."""

import pytest

from oracles.simulated_pipeline import GREEDY, make_request
from stageline_runtime.engine.scheduling.row_selection import Occasion, occasion_of
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_assignment import Cohorts
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, SlotFill, StepPlan


def make_scheduler(num_cohorts: int, *names: str) -> Scheduler:
    scheduler = Scheduler(SlotLedger(num_cohorts, 3 * num_cohorts, 64), max_step_tokens=8, max_waiting=100)
    for name in names:
        scheduler.add(make_request(name, (1, 2), 9))
    return scheduler


def plans_of(scheduler: Scheduler, most: int) -> list[StepPlan]:
    """What the engine sends now, up to `most` plans in flight."""
    plans = []
    while scheduler.num_plans_in_flight < most and (plan := scheduler.schedule()) is not None:
        plans.append(plan)
    return plans


def finish(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.complete(plan.seq, [SampledRow(row.slot, row.generation, 5) for row in plan.sampled_rows])


def begin(slot: int) -> PlanRow:
    return PlanRow(slot, 1, 0, 2, (1, 2), need_sample=True)


def decode(slot: int, position: int) -> PlanRow:
    return PlanRow(slot, 1, position, 1, (), need_sample=True)


@pytest.mark.parametrize(
    ("unfinished", "num_stages", "num_running", "expected"),
    [
        pytest.param((), 4, 2, Occasion(9, False), id="nothing in flight, every token is known"),
        pytest.param((8, 9), 4, 1, Occasion(9, False), id="a request alone is never held back"),
        pytest.param((8, 9), 4, 2, Occasion(7, False), id="only of finished plans"),
        pytest.param((7, 8, 9), 4, 3, Occasion(6, False), id="two plans between are one too few"),
        pytest.param((6, 7, 8, 9), 4, 3, Occasion(6, False), id="three plans between keep the first stage busy"),
        pytest.param((5, 6, 7, 8, 9), 4, 3, Occasion(6, False), id="and so do more"),
        pytest.param((7, 8, 9), 4, 4, Occasion(6, False), id="as many requests as stages: the newcomer's plan is next"),
        pytest.param((6, 7, 8, 9), 4, 4, Occasion(6, False), id="with a plan for each stage all go round"),
        pytest.param((7, 8, 9), 4, 5, Occasion(9, False), id="a stage is without a plan: each cohort makes its own"),
        pytest.param((6, 7, 8, 9), 4, 5, Occasion(9, True), id="plans come one by one: others' prompts may begin"),
        pytest.param((9,), 1, 2, Occasion(9, True), id="one stage"),
        pytest.param((8, 9), 2, 2, Occasion(8, False), id="two stages, round by round"),
        pytest.param((9,), 1, 1, Occasion(9, False), id="one stage, one request"),
    ],
)
def test_what_the_plans_in_flight_mean_for_the_next(
    unfinished: tuple[int, ...], num_stages: int, num_running: int, expected: Occasion
) -> None:
    assert occasion_of(10, unfinished, num_stages, num_running) == expected


def test_a_request_alone_is_planned_ahead() -> None:
    scheduler = make_scheduler(3, "a")
    assert [plan.rows for plan in plans_of(scheduler, 4)] == [(begin(0),), (decode(0, 2),)]


def test_a_decode_that_others_would_wait_behind_is_held_until_its_token_is_known() -> None:
    scheduler = make_scheduler(3, "a", "b")
    first, second = plans_of(scheduler, 4)
    assert (first.rows, second.rows) == ((begin(0),), (begin(1),))
    assert plans_of(scheduler, 4) == [], "both tokens are on the way"
    finish(scheduler, first)
    (third,) = plans_of(scheduler, 4)
    assert (third.rows, third.feedback_through) == ((decode(0, 2),), 0)
    scheduler.add(make_request("c", (1, 2), 9))
    (newcomer, *rest) = plans_of(scheduler, 4)
    assert newcomer.rows == (begin(2),), "nothing that waits is before it"
    assert [plan.rows for plan in rest] == [(decode(1, 2),)], "all three stages have a plan then"


def test_the_last_of_two_goes_on_when_the_other_is_gone() -> None:
    scheduler = make_scheduler(3, "a", "b")
    plans_of(scheduler, 4)
    assert scheduler.abort("a")
    assert [plan.rows for plan in plans_of(scheduler, 4)] == [(decode(1, 2),)]


def test_chunks_of_a_long_prompt_leave_a_decode_its_turn() -> None:
    """Three stages; a decodes while b's prompt fills plan after plan: a's decode comes after two of them."""
    scheduler = make_scheduler(3, "a")
    (first,) = plans_of(scheduler, 1)
    scheduler.add(make_request("b", tuple(range(40)), 2))
    plans = [first, *plans_of(scheduler, 4)]
    assert [tuple(row.slot for row in plan.rows) for plan in plans] == [(0,), (1,), (1,), (0, 1)], plans


def test_of_equally_light_cohorts_the_next_turn_is_joined() -> None:
    cohorts = Cohorts(3)
    assert cohorts.lightest() == 0
    cohorts.took_turn(0)
    assert cohorts.lightest() == 1
    cohorts.join(make_request("a", (1,), 2), 1)
    assert cohorts.lightest() == 2
    cohorts.took_turn(2)
    assert cohorts.lightest() == 0
    cohorts.join(make_request("b", (1,), 2), 0)
    assert cohorts.lightest() == 2, "lighter goes before sooner"


def loaded_scheduler() -> Scheduler:
    """Two stages with all the plans they need, cohorts of two and one, and the larger one's turn."""
    scheduler = make_scheduler(2, "a", "b", "c")
    plans = plans_of(scheduler, 3)
    assert [plan.rows for plan in plans] == [(begin(0), begin(2)), (begin(1),), (decode(0, 2), decode(2, 2))]
    finish(scheduler, plans[0])
    (fourth,) = plans_of(scheduler, 3)
    assert fourth.rows == (decode(1, 2),)
    finish(scheduler, plans[1])
    assert scheduler.cohort_sizes() == (2, 1)
    return scheduler


def test_a_first_chunk_runs_in_the_plan_that_passes_and_the_decode_in_its_own_turn() -> None:
    scheduler = loaded_scheduler()
    scheduler.add(make_request("d", (1, 2), 9))
    (passing,) = plans_of(scheduler, 3)
    assert scheduler.cohort_sizes() == (2, 2)
    assert (passing.cohort, passing.rows) == (0, (decode(0, 3), decode(2, 3), begin(3)))
    assert passing.fills == (SlotFill(3, 1, GREEDY),)
    own = scheduler.schedule()
    assert own is not None
    assert (own.cohort, own.rows) == (1, (decode(1, 3),)), "d's token is not known, and b need not wait for it"
    for seq in (2, 3):
        scheduler.complete(seq, [])
    finish(scheduler, passing)
    finish(scheduler, own)
    rows = [row for plan in plans_of(scheduler, 3) if plan.cohort == 1 for row in plan.rows]
    assert decode(3, 2) in rows


def test_no_more_than_one_prompt_of_others_begins_in_a_plan() -> None:
    scheduler = loaded_scheduler()
    for name in "de":
        scheduler.add(make_request(name, (1, 2), 9))
    (passing,) = plans_of(scheduler, 3)
    assert scheduler.cohort_sizes() == (3, 2)
    assert (passing.cohort, [fill.slot for fill in passing.fills]) == (0, [4]), "e is the cohort's own; d waits"


def test_prompts_that_come_together_run_in_a_plan_each() -> None:
    scheduler = make_scheduler(2, *"abcd")
    plans = plans_of(scheduler, 2)
    assert [plan.rows for plan in plans] == [(begin(0), begin(2)), (begin(1), begin(3))]
