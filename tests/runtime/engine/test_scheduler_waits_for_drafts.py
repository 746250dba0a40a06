"""A plan says what the last stage is to draft, and the request's next row waits for it: results given by hand."""

from oracles.simulated_pipeline import make_request
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import Drafted, DraftedRow, PlanRow, SampledRow, StepPlan
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import FREE

PROMPT = (1, 2, 3)


def make_scheduler(num_stages: int = 2, slots: int = 2) -> Scheduler:
    speculation = Speculation(7, 1, FREE, draft_context_tokens=128, has_draft_model=True)
    return Scheduler(
        SlotLedger(num_stages, num_stages * slots, 128), max_step_tokens=64, max_waiting=8, speculation=speculation
    )


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def drafted(plan: StepPlan, position: int, *token_ids: int) -> Drafted:
    (row,) = plan.drafted_rows
    return Drafted(plan.seq, (DraftedRow(row.slot, row.generation, position, token_ids),), 0.001)


def test_the_next_row_waits_and_verifies_what_was_drafted() -> None:
    scheduler = make_scheduler()
    request = make_request("a", PROMPT, 40)
    scheduler.add(request)
    first = planned(scheduler)
    assert (first.rows[0].wants_drafts, first.draft_steps) == (True, 3)
    assert scheduler.schedule() is None, "no decode is planned beside it"
    scheduler.complete(first.seq, [SampledRow(0, 1, 9)])
    assert scheduler.schedule() is None, "what is drafted has yet to come"
    scheduler.take_drafts(drafted(first, 4, 5, 6, 7))
    second = planned(scheduler)
    assert second.rows == (PlanRow(0, 1, 3, 4, (9, 5, 6, 7), need_sample=True, num_drafts=3, wants_drafts=True),)
    assert second.draft_steps == 3
    scheduler.complete(second.seq, [SampledRow(0, 1, 8, num_sampled=4)])
    assert request.output == [9, 5, 6, 7, 8]
    scheduler.take_drafts(drafted(second, 8, 1))
    assert planned(scheduler).draft_steps == 7, "all held"


def test_a_row_for_which_nothing_was_drafted_decodes() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", PROMPT, 40))
    first = planned(scheduler)
    scheduler.complete(first.seq, [SampledRow(0, 1, 9)])
    scheduler.take_drafts(drafted(first, 0))
    (row,) = planned(scheduler).rows
    assert (row.num_drafts, row.num_tokens, row.wants_drafts) == (0, 1, True)


def test_nothing_is_drafted_where_no_row_could_verify_it() -> None:
    """With two tokens to come, the second is the row's own."""
    for length, wants in ((1, False), (2, False), (3, True)):
        scheduler = make_scheduler()
        scheduler.add(make_request("a", PROMPT, length))
        assert planned(scheduler).rows[0].wants_drafts == wants, length


def test_drafts_for_a_request_that_has_left_reach_nobody() -> None:
    scheduler = make_scheduler(num_stages=1, slots=1)
    scheduler.add(make_request("a", PROMPT, 40))
    first = planned(scheduler)
    scheduler.complete(first.seq, [SampledRow(0, 1, 9)])
    scheduler.abort("a")
    scheduler.add(make_request("b", PROMPT, 40))
    second = planned(scheduler)
    assert second.rows[0].generation == 2
    scheduler.complete(second.seq, [SampledRow(0, 2, 9)])
    scheduler.take_drafts(drafted(first, 4, 5))
    assert scheduler.schedule() is None, "its own have yet to come"
    scheduler.take_drafts(drafted(second, 4, 6))
    assert planned(scheduler).rows[0].token_ids == (9, 6)


def test_a_chunk_that_samples_nothing_asks_for_nothing() -> None:
    speculation = Speculation(7, 1, FREE, draft_context_tokens=128, has_draft_model=True)
    scheduler = Scheduler(SlotLedger(1, 1, 128), max_step_tokens=2, max_waiting=8, speculation=speculation)
    scheduler.add(make_request("a", PROMPT, 40))
    assert [(plan.draft_steps, plan.drafted_rows) for plan in (planned(scheduler),)] == [(0, ())]
    assert planned(scheduler).draft_steps == 3
