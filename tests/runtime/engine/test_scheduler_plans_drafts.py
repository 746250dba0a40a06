"""Which plans carry drafts, and what comes of them: one request at a time, results given by hand."""

import pytest

from oracles.simulated_pipeline import GREEDY, make_request
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.scheduler import NewToken, Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, StepPlan
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, BusProtocolError
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import FREE, StepCost

PERIOD = (1, 2, 3, 4, 5, 6, 7, 8)
PROMPT = PERIOD * 2 + (1, 2)


def make_scheduler(num_stages: int = 1, *, cost: StepCost = FREE, tokens: int = 3) -> Scheduler:
    ledger = SlotLedger(num_stages, 2 * num_stages, 128)
    return Scheduler(ledger, max_step_tokens=64, max_waiting=8, speculation=Speculation(tokens, 2, cost))


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def sampled(token: int, *, count: int = 1) -> list[SampledRow]:
    return [SampledRow(0, 1, token, num_sampled=count)]


def begun(scheduler: Scheduler, length: int = 40, prompt: tuple[int, ...] = PROMPT) -> Request:
    """A request whose first token is back and went on as the prompt did."""
    request = make_request("a", prompt, length)
    scheduler.add(request)
    plan = planned(scheduler)
    assert scheduler.schedule() is None, "what is known has a continuation, so the newest token is waited for"
    scheduler.complete(plan.seq, sampled(3))
    return request


def test_a_verifying_row_holds_the_newest_token_and_drafts() -> None:
    scheduler = make_scheduler()
    begun(scheduler)
    plan = planned(scheduler)
    row = PlanRow(0, 1, len(PROMPT), 4, (3, 4, 5, 6), need_sample=True, num_drafts=3)
    assert plan.rows == (row,)
    assert (plan.padded_tokens, plan.feedback_through, plan.feedback_posted) == (4, 0, True)
    assert not row.is_chunk
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("result", "output"),
    [
        (sampled(7, count=4), [3, 4, 5, 6, 7]),
        (sampled(9, count=3), [3, 4, 5, 9]),
        (sampled(9, count=1), [3, 9]),
    ],
    ids=["all-hold", "some-hold", "none-holds"],
)
def test_what_holds_becomes_output_and_the_next_row_follows_it(result: list[SampledRow], output: list[int]) -> None:
    scheduler = make_scheduler()
    request = begun(scheduler)
    plan = planned(scheduler)
    tokens = scheduler.complete(plan.seq, result)
    assert request.output == output
    assert tokens == [NewToken("a", token, finished=False, stopped=False) for token in output[1:]]
    following = planned(scheduler)
    assert following.rows[0].position == len(PROMPT) + len(output) - 1


def test_a_stop_token_among_the_drafts_ends_the_request_there() -> None:
    scheduler = make_scheduler()
    scheduler.add(
        Request(request_id="a", prompt=PROMPT, sampling=GREEDY, max_new_tokens=40, stop_token_ids=frozenset({5}))
    )
    scheduler.complete(planned(scheduler).seq, sampled(3))
    tokens = scheduler.complete(planned(scheduler).seq, sampled(7, count=4))
    assert [(token.token, token.finished, token.stopped) for token in tokens] == [(4, False, False), (5, True, True)]
    assert not scheduler.has_requests
    assert scheduler.speculation is not None
    counts = scheduler.speculation.counts
    assert (counts.drafted, counts.held, counts.held_at) == (3, 2, [1, 1]), "the third draft became no output"


def test_nobody_drafts_from_what_follows_a_stop_token() -> None:
    speculation = Speculation(3, 2, FREE, num_recent_answers=2)
    scheduler = Scheduler(SlotLedger(1, 2, 128), max_step_tokens=64, max_waiting=8, speculation=speculation)
    scheduler.add(
        Request(request_id="a", prompt=PROMPT, sampling=GREEDY, max_new_tokens=40, stop_token_ids=frozenset({5}))
    )
    scheduler.complete(planned(scheduler).seq, sampled(3))
    scheduler.complete(planned(scheduler).seq, sampled(7, count=4))
    known = (*PROMPT, 3, 4)
    drafts = speculation.of_request(PROMPT).propose(len(known), lambda start, stop: known[start:stop], 1)
    assert drafts == (5,), "and nothing behind its end"


@pytest.mark.parametrize(("length", "drafts"), [(2, 0), (3, 1), (4, 2), (9, 3)])
def test_no_draft_reaches_past_the_last_token(length: int, drafts: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", PROMPT, length))
    scheduler.complete(planned(scheduler).seq, sampled(3))
    assert planned(scheduler).rows[0].num_drafts == drafts


def test_without_a_match_decodes_go_ahead_as_ever() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", tuple(range(1, 20)), 8))
    assert [planned(scheduler).rows[0].num_drafts for _ in range(2)] == [0, 0]


def test_drafts_that_cost_too_much_are_left_out() -> None:
    scheduler = make_scheduler(cost=StepCost(0.0, 1.0))
    scheduler.add(make_request("a", PROMPT, 8))
    planned(scheduler)
    assert planned(scheduler).rows[0].token_ids == ()


def test_the_next_verifying_row_waits_for_the_one_in_flight() -> None:
    """Whatever stages have nothing to do: a row is made of known tokens."""
    scheduler = make_scheduler(num_stages=3)
    begun(scheduler)
    first = planned(scheduler)
    assert scheduler.schedule() is None
    scheduler.complete(first.seq, sampled(7, count=4))
    following = planned(scheduler)
    assert (following.rows[0].token_ids, following.feedback_through) == ((7, 8, 1, 2), first.seq)
    assert scheduler.schedule() is None


@pytest.mark.parametrize("count", [0, 5])
def test_a_verifying_row_samples_one_token_at_least_and_one_more_than_its_drafts_at_most(count: int) -> None:
    scheduler = make_scheduler()
    begun(scheduler)
    plan = planned(scheduler)
    with pytest.raises(BusProtocolError, match=rf"SampledRow.num_sampled of slot 0 is {count} .*, of 1 to 4"):
        scheduler.complete(plan.seq, sampled(7, count=count))


def test_only_what_holds_is_a_beginning_for_others() -> None:
    """Guessed tokens lie in the cache as well, and a request that began like them must not find them there."""
    ledger = SlotLedger(2, 4, 128, prefix_cache=True)
    scheduler = Scheduler(ledger, max_step_tokens=64, max_waiting=8, speculation=Speculation(7, 2, FREE))
    begun(scheduler, prompt=(PERIOD * 4)[:26])
    first = planned(scheduler)
    assert first.rows[0].token_ids == (3, 4, 5, 6), "its drafts end at position 30"
    assert ledger.num_cached(0) == 1, "the second block is guessed, whatever is in flight"
    scheduler.complete(first.seq, sampled(9, count=2))
    again = planned(scheduler)
    assert again.rows[0].position == 28
    guessed, known = (PERIOD * 8)[:40], ((*(PERIOD * 4)[:26], 3, 4, 9))
    assert [ledger.take(tokens)[2] for tokens in (guessed, known)] == [BLOCK_TOKENS, BLOCK_TOKENS]


def test_another_request_runs_beside_a_verifying_row() -> None:
    scheduler = make_scheduler(num_stages=2)
    begun(scheduler)
    scheduler.add(make_request("b", tuple(range(50, 70)), 4))
    plans = [planned(scheduler), planned(scheduler)]
    assert {row.slot for plan in plans for row in plan.rows} == {0, 1}
    assert sum(row.num_drafts > 0 for plan in plans for row in plan.rows) == 1


def test_a_verifying_row_of_a_request_that_lost_its_slot_counts_for_nothing() -> None:
    ledger = SlotLedger(3, 6, 128, num_blocks=8)
    scheduler = Scheduler(ledger, max_step_tokens=64, max_waiting=8, speculation=Speculation(3, 2, FREE))
    request = begun(scheduler)
    verifying = planned(scheduler)
    scheduler.add(make_request("b", tuple(range(50, 164)), 4, priority=-1))
    assert [row.token_ids[0] for row in planned(scheduler).rows] == [50]
    assert scheduler.num_preemptions == 1
    assert scheduler.complete(verifying.seq, sampled(7, count=4)) == []
    assert (request.output, request.verifying) == ([3], None)


def test_what_one_request_was_answered_the_next_one_drafts_from() -> None:
    prompt = tuple(range(40, 70))
    ledger = SlotLedger(1, 2, 128)
    speculation = Speculation(3, 2, FREE, num_recent_answers=2)
    scheduler = Scheduler(ledger, max_step_tokens=64, max_waiting=8, speculation=speculation)
    scheduler.add(make_request("a", prompt, 6))
    answer = (3, 9, 4, 8, 5, 7)
    for token in answer:
        plan = planned(scheduler)
        assert not plan.rows[0].num_drafts, "it has never said that"
        scheduler.complete(plan.seq, [SampledRow(plan.rows[0].slot, plan.rows[0].generation, token)])
    assert not scheduler.has_requests
    scheduler.add(make_request("b", prompt, 6))
    plan = planned(scheduler)
    scheduler.complete(plan.seq, [SampledRow(plan.rows[0].slot, plan.rows[0].generation, answer[0])])
    row = planned(scheduler).rows[0]
    assert (row.token_ids, row.num_drafts) == (answer[:4], 3)
