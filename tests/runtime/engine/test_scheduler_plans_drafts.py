"""Which plans carry drafts, and what comes of them: one request at a time, results given by hand."""

import pytest

from oracles.simulated_pipeline import GREEDY, make_request
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.scheduler import NewToken, Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, StepPlan
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import FREE, StepCost

PERIOD = (1, 2, 3, 4, 5, 6, 7, 8)
PROMPT = PERIOD * 2 + (1, 2)


def make_scheduler(num_stages: int = 1, *, cost: StepCost = FREE, tokens: int = 3) -> Scheduler:
    ledger = SlotLedger(num_stages, 2, 128)
    return Scheduler(ledger, max_step_tokens=64, max_waiting=8, speculation=Speculation(tokens, 2, cost))


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def sampled(token: int, *, count: int = 1, rejected: int = 0) -> list[SampledRow]:
    return [SampledRow(0, 1, token, num_sampled=count, num_rejected=rejected)]


def planned_and_begun(scheduler: Scheduler) -> StepPlan:
    """The next plan, which the first stage says that it begins."""
    plan = planned(scheduler)
    assert plan.report_begin, "a chain's next row waits for that"
    scheduler.note_begun(plan.seq)
    return plan


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
        (sampled(9, count=3, rejected=1), [3, 4, 5, 9]),
        (sampled(9, count=1, rejected=3), [3, 9]),
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


def test_a_chain_fills_the_stages_and_goes_on_while_it_holds() -> None:
    scheduler = make_scheduler(num_stages=3)
    begun(scheduler)
    first, second, third = (planned_and_begun(scheduler) for _ in range(3))
    assert [plan.rows[0].token_ids for plan in (first, second, third)] == [(3, 4, 5, 6), (7, 8, 1, 2), (3, 4, 5, 6)]
    assert [plan.rows[0].position for plan in (first, second, third)] == [18, 22, 26]
    assert [plan.feedback_through for plan in (first, second, third)] == [0, 0, 0], "no stage waits for a guess"
    assert scheduler.schedule() is None, "no more than one plan for each stage"
    tokens = scheduler.complete(first.seq, sampled(7, count=4))
    assert [token.token for token in tokens] == [4, 5, 6, 7]
    assert scheduler.take_cancelled() == []
    assert planned(scheduler).rows[0].position == 30


def test_one_row_of_a_chain_waits_before_the_first_stage() -> None:
    """What has been sent and not begun is all that a newcomer finds before it."""
    scheduler = make_scheduler(num_stages=4)
    begun(scheduler)
    first = planned(scheduler)
    assert scheduler.schedule() is None, "the first stage has not begun the row before"
    scheduler.note_begun(first.seq)
    second = planned(scheduler)
    assert scheduler.schedule() is None
    scheduler.note_begun(first.seq)
    assert scheduler.schedule() is None, "told again, it means nothing new"
    scheduler.add(make_request("b", tuple(range(50, 70)), 4))
    newcomer = planned(scheduler)
    assert [row.slot for row in newcomer.rows] == [2], "a newcomer waits for nobody to begin"
    scheduler.note_begun(second.seq)
    assert scheduler.schedule() is None, "it is the newest now"
    scheduler.note_begun(newcomer.seq)
    assert planned(scheduler).rows[0].position == 26, "the chain goes on behind it"


def test_a_plan_that_is_done_has_begun() -> None:
    """Whether or not the first stage's word of it has come."""
    scheduler = make_scheduler(num_stages=3)
    begun(scheduler)
    first, second = planned_and_begun(scheduler), planned(scheduler)
    scheduler.complete(first.seq, sampled(7, count=4))
    assert scheduler.schedule() is None
    scheduler.complete(second.seq, sampled(3, count=4))
    third = planned(scheduler)
    assert third.rows[0].position == 26
    scheduler.note_begun(second.seq)
    assert scheduler.schedule() is None, "the word of a plan before says nothing of the newest"


@pytest.mark.parametrize(("num_stages", "chains", "asks"), [(1, True, False), (2, True, True), (2, False, False)])
def test_the_first_stage_is_asked_only_where_a_chain_may_follow(num_stages: int, chains: bool, asks: bool) -> None:
    scheduler = make_scheduler(num_stages)
    assert scheduler.speculation is not None
    scheduler.speculation.chains = chains
    begun(scheduler)
    verifying = planned(scheduler)
    assert verifying.rows[0].num_drafts == 3
    assert verifying.report_begin == asks


def test_full_stages_are_not_asked_when_they_begin() -> None:
    """As many plans are in flight as there are stages: no chain can follow, and a step costs what it did."""
    scheduler = make_scheduler(num_stages=2)
    begun(scheduler)
    for name in "bc":
        scheduler.add(make_request(name, tuple(range(50, 70)), 4))
    plans = [planned(scheduler) for _ in range(3)]
    assert [plan.rows[0].num_drafts for plan in plans] == [0, 3, 0]
    assert [plan.report_begin for plan in plans] == [False, True, False], "before the guess, the guess, behind it"


def test_a_broken_chain_is_cancelled_and_begun_anew() -> None:
    scheduler = make_scheduler(num_stages=3)
    request = begun(scheduler)
    first, second, third = (planned_and_begun(scheduler) for _ in range(3))
    scheduler.complete(first.seq, sampled(9, count=2, rejected=2))
    assert scheduler.take_cancelled() == [second.seq, third.seq]
    assert scheduler.take_cancelled() == []
    assert request.output == [3, 4, 9]
    again = planned(scheduler)
    assert again.rows[0].position == len(PROMPT) + 2
    for dead in (second, third):
        assert scheduler.complete(dead.seq, sampled(0, count=0, rejected=3)) == []
    assert request.output == [3, 4, 9]
    assert scheduler.complete(again.seq, sampled(5))[0].token == 5


def test_only_what_holds_is_a_beginning_for_others() -> None:
    """Guessed tokens lie in the cache as well, and a request that began like them must not find them there."""
    ledger = SlotLedger(2, 2, 128, prefix_cache=True)
    scheduler = Scheduler(ledger, max_step_tokens=64, max_waiting=8, speculation=Speculation(7, 2, FREE))
    begun(scheduler, prompt=(PERIOD * 4)[:26])
    index = ledger.prefixes
    assert index is not None
    first, _second = (planned_and_begun(scheduler) for _ in range(2))
    assert first.rows[0].token_ids == (3, 4, 5, 6), "its drafts end at position 30"
    assert index.num_blocks(0) == 1, "the second block is guessed, whatever is in flight"
    scheduler.complete(first.seq, sampled(9, count=2, rejected=2))
    again = planned(scheduler)
    assert again.rows[0].position == 28
    guessed, known = (PERIOD * 8)[:40], ((*(PERIOD * 4)[:26], 3, 4, 9))
    assert [index.match(tokens)[0] for tokens in (guessed, known)] == [1, 1]


def test_others_go_before_chains() -> None:
    scheduler = make_scheduler(num_stages=2)
    begun(scheduler)
    scheduler.add(make_request("b", tuple(range(50, 70)), 4))
    plans = [planned(scheduler), planned(scheduler)]
    assert {row.slot for plan in plans for row in plan.rows} == {0, 2}
    assert sum(row.num_drafts > 0 for plan in plans for row in plan.rows) == 1


@pytest.mark.parametrize(("rows_of_a", "chained"), [(0, ["a", "b"]), (5, ["b", "b"])], ids=["alike", "unlike"])
def test_the_chain_likeliest_to_hold_is_made_longer(rows_of_a: int, chained: list[str]) -> None:
    """A stage that nobody needs takes a row of whichever request it most probably helps."""
    scheduler = make_scheduler(num_stages=4)
    requests = [make_request(name, PROMPT, 40) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    for plan in [planned(scheduler), planned(scheduler)]:
        (row,) = plan.rows
        scheduler.complete(plan.seq, [SampledRow(row.slot, row.generation, 3)])
    assert requests[0].drafts is not None
    for _ in range(rows_of_a):
        requests[0].drafts.note_row(3, 1)
    by_slot = {request.slot: request.request_id for request in requests}
    asked = [by_slot[planned_and_begun(scheduler).rows[0].slot] for _ in range(4)]
    assert asked == ["a", "b", *chained]
    assert scheduler.schedule() is None


def test_an_aborted_chain_is_cancelled_but_for_the_guess_that_is_known() -> None:
    scheduler = make_scheduler(num_stages=3)
    begun(scheduler)
    first, second, third = (planned_and_begun(scheduler) for _ in range(3))
    scheduler.complete(first.seq, sampled(7, count=4))
    assert scheduler.abort("a")
    assert scheduler.take_cancelled() == [third.seq], second.seq


def test_the_chain_of_a_request_that_loses_its_slot_is_cancelled_but_for_the_guess_that_is_known() -> None:
    ledger = SlotLedger(3, 2, 128, num_blocks=8)
    scheduler = Scheduler(ledger, max_step_tokens=64, max_waiting=8, speculation=Speculation(3, 2, FREE))
    request = begun(scheduler)
    _first, second, third = (planned_and_begun(scheduler) for _ in range(3))
    scheduler.add(make_request("b", tuple(range(50, 164)), 4, priority=-1))
    assert [row.token_ids[0] for row in planned(scheduler).rows] == [50]
    assert scheduler.num_preemptions == 1
    assert scheduler.take_cancelled() == [second.seq, third.seq]
    assert not request.guesses


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
