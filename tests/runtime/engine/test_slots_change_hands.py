"""Exact plans where requests share beginnings, run out of blocks, or have priorities."""

from dataclasses import replace
from typing import Any

import msgspec

from oracles.simulated_pipeline import GREEDY, make_request
from stageline_runtime.engine.scheduling.row_selection import FirstRow
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, SampledRow, SlotBlocks, SlotFill, StepPlan

SHARED = tuple(range(100, 148))
"""Three blocks."""


def make_scheduler(num_cohorts: int = 1, slots: int = 2, budget: int = 64, **ledger: Any) -> Scheduler:
    return Scheduler(
        SlotLedger(num_cohorts, num_cohorts * slots, 64, **ledger), max_step_tokens=budget, max_waiting=100
    )


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def finish(scheduler: Scheduler, plan: StepPlan, token: int = 50) -> list[str]:
    """Complete a plan; returns whose tokens came."""
    rows = [SampledRow(row.slot, row.generation, token) for row in plan.sampled_rows]
    return [new.request_id for new in scheduler.complete(plan.seq, rows)]


def spans(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Slot, first position and number of tokens of each row."""
    return [(row.slot, row.position, row.num_tokens) for row in plan.rows]


# -- prefixes ----------------------------------------------------------------------------------------------------


def test_the_rest_of_a_prompt_is_computed_behind_what_is_still_cached() -> None:
    scheduler = make_scheduler(prefix_cache=True)
    scheduler.add(make_request("a", (*SHARED, 1), 1))
    finish(scheduler, planned(scheduler))
    scheduler.add(make_request("b", (*SHARED, 2, 3), 1))
    plan = planned(scheduler)
    assert plan.fills == (SlotFill(0, 2, GREEDY, cached_tokens=48),)
    assert plan.tables == (
        SlotBlocks(0, 0, ()),
        SlotBlocks(0, 0, (0, 1, 2)),
        SlotBlocks(0, 3, (3,), are_new=True),
    )
    assert plan.rows == (PlanRow(0, 2, 48, 2, (2, 3), need_sample=True),)
    assert scheduler.first_rows() == [FirstRow("a", 49, 0), FirstRow("b", 50, 48)]


def test_what_a_running_request_has_computed_is_shared() -> None:
    scheduler = make_scheduler(prefix_cache=True)
    scheduler.add(make_request("a", (*SHARED, 1), 9))
    planned(scheduler)
    scheduler.add(make_request("b", (*SHARED[:40], 2, 3), 1))
    plan = planned(scheduler)
    assert plan.fills == (SlotFill(1, 1, GREEDY, cached_tokens=32),)
    assert plan.tables == (SlotBlocks(1, 0, (0, 1)), SlotBlocks(1, 2, (4,), are_new=True))
    assert spans(plan) == [(0, 49, 1), (1, 32, 10)]


def test_rows_of_the_same_plan_are_too_late_to_be_shared() -> None:
    scheduler = make_scheduler(prefix_cache=True, budget=100)
    scheduler.add(make_request("a", (*SHARED, 1), 9))
    scheduler.add(make_request("b", (*SHARED, 2), 9))
    plan = planned(scheduler)
    assert [fill.cached_tokens for fill in plan.fills] == [0, 0]
    assert spans(plan) == [(0, 0, 49), (1, 0, 49)]


def test_chunks_of_a_prompt_still_under_way_are_shared_as_far_as_earlier_plans_go() -> None:
    scheduler = make_scheduler(num_cohorts=2, prefix_cache=True, budget=20)
    scheduler.add(make_request("a", (*SHARED, 1), 9))
    scheduler.add(make_request("b", (*SHARED, 2), 9))
    first, second = planned(scheduler), planned(scheduler)
    assert spans(first) == [(0, 0, 20)]
    assert second.fills == (SlotFill(1, 1, GREEDY, cached_tokens=16),)
    assert spans(second) == [(1, 16, 20)]


def test_answers_are_known_beginnings_too() -> None:
    """The next turn of a chat: prompt, answer and more."""
    scheduler = make_scheduler(prefix_cache=True)
    scheduler.add(make_request("a", SHARED[:10], 7))
    while scheduler.has_requests:
        finish(scheduler, planned(scheduler), token=9)
    scheduler.add(make_request("b", (*SHARED[:10], *(9,) * 7, 4), 1))
    assert planned(scheduler).fills == (SlotFill(0, 2, GREEDY, cached_tokens=16),)


def test_the_last_stage_is_told_the_ids_it_needs_for_penalties() -> None:
    scheduler = make_scheduler(prefix_cache=True)
    scheduler.add(make_request("a", (*SHARED, 1), 1))
    finish(scheduler, planned(scheduler))
    request = make_request("b", (*SHARED, 2), 1)
    request = replace(request, sampling=msgspec.structs.replace(GREEDY, repetition_penalty=1.5))
    scheduler.add(request)
    assert planned(scheduler).fills[0].cached_token_ids == SHARED


def test_aborted_before_its_first_row_it_leaves_what_it_shared() -> None:
    scheduler = make_scheduler(prefix_cache=True, budget=1)
    scheduler.add(make_request("a", (*SHARED[:16], 1), 1))
    while scheduler.has_requests:
        finish(scheduler, planned(scheduler))
    scheduler.add(make_request("b", (9, 9), 1))
    scheduler.add(make_request("c", (*SHARED[:16], 2), 1))
    assert spans(planned(scheduler)) == [(0, 0, 1)]
    assert scheduler.abort("c")
    scheduler.add(make_request("d", (*SHARED[:16], 3), 1))
    planned(scheduler)
    assert planned(scheduler).fills == (SlotFill(1, 2, GREEDY, cached_tokens=16),)


def test_without_the_cache_everything_is_computed() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, (*SHARED, 1), 1))
        plan = planned(scheduler)
        assert plan.fills[0].cached_tokens == 0
        finish(scheduler, plan)


# -- blocks ------------------------------------------------------------------------------------------------------


def test_the_youngest_loses_its_slot_and_starts_again_from_all_its_tokens() -> None:
    """Four blocks: a fills its second when b has its second too; b makes room and comes back when a has ended."""
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", tuple(range(31)), 4))
    scheduler.add(make_request("b", tuple(range(50, 66)), 9))
    assert spans(first := planned(scheduler)) == [(0, 0, 31), (1, 0, 16)]
    assert spans(second := planned(scheduler)) == [(0, 31, 1), (1, 16, 1)]
    assert (scheduler.ledger.held_blocks, scheduler.num_preemptions) == (4, 0)
    assert finish(scheduler, first, 7) == ["a", "b"]
    third = planned(scheduler)
    assert spans(third) == [(0, 32, 1)]
    assert third.tables == (SlotBlocks(1, 0, ()), SlotBlocks(0, 2, (2,), are_new=True))
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (1, 1, 1)
    assert finish(scheduler, second, 8) == ["a"], "b's row was in flight and runs dead"
    assert spans(fourth := planned(scheduler)) == [(0, 33, 1)]
    assert finish(scheduler, third, 9) == ["a"]
    assert finish(scheduler, fourth, 9) == ["a"]
    again = planned(scheduler)
    assert again.fills == (SlotFill(0, 2, GREEDY),)
    assert again.rows == (PlanRow(0, 2, 0, 17, (*range(50, 66), 7), need_sample=True),)
    assert finish(scheduler, again, 8) == ["b"]


def test_the_least_senior_waits_for_a_block_where_it_is() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", tuple(range(32)), 2))
    scheduler.add(make_request("b", tuple(range(50, 66)), 9))
    assert spans(first := planned(scheduler)) == [(0, 0, 32), (1, 0, 16)]
    assert spans(second := planned(scheduler)) == [(0, 32, 1)], "a holds three blocks, b one and needs another"
    assert scheduler.schedule() is None
    assert finish(scheduler, first) == ["a", "b"]
    assert scheduler.schedule() is None
    assert finish(scheduler, second) == ["a"]
    assert spans(planned(scheduler)) == [(1, 16, 1)]
    assert scheduler.num_preemptions == 0


def test_who_lost_its_slot_comes_before_those_who_came_later() -> None:
    scheduler = make_scheduler(num_blocks=4, slots=3)
    scheduler.add(make_request("a", tuple(range(31)), 4))
    scheduler.add(make_request("b", tuple(range(50, 66)), 9))
    plans = [planned(scheduler), planned(scheduler)]
    scheduler.add(make_request("c", (1,), 1))
    finish(scheduler, plans[0])
    planned(scheduler)
    assert scheduler.num_preemptions == 1
    assert scheduler.schedule() is None, "c would fit, and would keep b out"
    assert scheduler.abort("a")
    assert spans(planned(scheduler)) == [(0, 0, 17), (1, 0, 1)]


# -- priorities --------------------------------------------------------------------------------------------------


def test_the_lower_number_gets_the_next_slot() -> None:
    scheduler = make_scheduler(slots=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -5)):
        scheduler.add(make_request(name, (ord(name),), 1, priority=priority))
    order = []
    while scheduler.has_requests:
        order += finish(scheduler, planned(scheduler))
    assert order == ["d", "a", "c", "b"]


def test_a_higher_priority_takes_a_slot_from_a_lower_one_only_where_none_is_free() -> None:
    scheduler = make_scheduler(slots=2)
    scheduler.add(make_request("a", (1, 2), 9, priority=1))
    first = planned(scheduler)
    scheduler.add(make_request("b", (3,), 9))
    second = planned(scheduler)
    assert scheduler.num_preemptions == 0
    scheduler.add(make_request("c", (4,), 9))
    third = planned(scheduler)
    assert [fill.slot for fill in third.fills] == [0]
    assert scheduler.num_preemptions == 1
    scheduler.add(make_request("d", (5,), 9))
    assert scheduler.schedule() is not None
    assert scheduler.num_preemptions == 1, "never from its own priority"
    assert finish(scheduler, first) == [], "a has lost its slot"
    assert finish(scheduler, second) == ["b"]
    assert finish(scheduler, third) == ["c", "b"]


def test_nobody_loses_a_slot_in_vain() -> None:
    """Taking the slot of a would not make enough room, so a keeps it."""
    scheduler = make_scheduler(slots=3, num_blocks=5)
    scheduler.add(make_request("b", tuple(range(40)), 9))
    scheduler.add(make_request("a", (1,), 9, priority=1))
    planned(scheduler)
    scheduler.add(make_request("c", tuple(range(40)), 1))
    planned(scheduler)
    assert (scheduler.num_running, scheduler.num_preemptions) == (2, 0)


def test_what_lower_ones_share_is_room_for_a_higher_one() -> None:
    """Either of a and b alone would free a block; both together free all."""
    scheduler = make_scheduler(slots=3, num_blocks=5, prefix_cache=True)
    for name in "ab":
        scheduler.add(make_request(name, (*SHARED, ord(name)), 9, priority=1))
        planned(scheduler)
    assert (scheduler.num_running, scheduler.ledger.held_blocks) == (2, 5)
    scheduler.add(make_request("c", tuple(range(60)), 1))
    planned(scheduler)
    assert (scheduler.num_running, scheduler.num_preemptions) == (1, 2)


# -- turns -------------------------------------------------------------------------------------------------------


def test_chunks_of_a_long_prompt_do_not_wait_for_their_cohorts_turn() -> None:
    """b decodes in the other cohort; a's chunks fill up its plans, and a decodes once its first token is known."""
    scheduler = make_scheduler(num_cohorts=2, budget=20)
    scheduler.add(make_request("a", tuple(range(50)), 9))
    scheduler.add(make_request("b", (1,), 9))
    first, second, third = planned(scheduler), planned(scheduler), planned(scheduler)
    assert [(plan.cohort, spans(plan)) for plan in (first, second, third)] == [
        (0, [(0, 0, 20)]),
        (1, [(0, 20, 19), (1, 0, 1)]),
        (0, [(0, 39, 11)]),
    ]
    assert [row.need_sample for row in third.rows] == [True]
    scheduler.add(make_request("c", tuple(range(60, 90)), 9))
    fourth = planned(scheduler)
    assert (fourth.cohort, spans(fourth)) == (1, [(1, 1, 1), (2, 0, 19)]), (
        "nor do first chunks, once all stages have plans"
    )


def test_after_a_last_chunk_in_anothers_turn_the_first_token_must_be_known() -> None:
    scheduler = make_scheduler(num_cohorts=2, budget=20)
    for name, prompt in {"a": tuple(range(30)), "b": (1,), "c": (2,)}.items():
        scheduler.add(make_request(name, prompt, 9))
    plans = [planned(scheduler) for _ in range(5)]
    assert [(plan.cohort, spans(plan)) for plan in plans] == [
        (0, [(0, 0, 20)]),
        (1, [(0, 20, 10), (1, 0, 1)]),
        (0, [(2, 0, 1)]),
        (1, [(1, 1, 1)]),
        (0, [(2, 1, 1)]),
    ]
    assert [row.need_sample for row in plans[1].rows] == [True, True]
    assert scheduler.schedule() is None
    finish(scheduler, plans[0])
    finish(scheduler, plans[1])
    assert [spans(planned(scheduler)) for _ in range(2)] == [[(1, 2, 1)], [(0, 30, 1)]]
