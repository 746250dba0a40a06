"""Ranks hear of a cancelled plan at different moments, and all leave it out or none does; they meet in heartbeats."""

from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest

from oracles.thread_ranks import ThreadRank, ThreadRanks
from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.ranks.agreement import have_all_heard
from stageline_runtime.ranks.protocol import LoneRank
from stageline_runtime.ranks.stage_ranks import StageRanks
from stageline_runtime.stage.ranks.joining import JoinedRanks
from stageline_runtime.stage.telemetry.watchdog import Watchdog
from stageline_runtime.termination import RuntimeFailure

CHAINED = PlanRow(0, 1, 30, 2, (7, 8), True, 1)
DECODE = PlanRow(1, 1, 30, 1, (), True)


@pytest.mark.parametrize(
    ("heard", "agreed"),
    [((True, True, True), True), ((True, False, True), False), ((False, True, True), False), ((False,) * 3, False)],
    ids=str,
)
def test_all_ranks_conclude_alike(heard: tuple[bool, ...], agreed: bool) -> None:
    shared = ThreadRanks(len(heard))

    def ask(rank: ThreadRank) -> bool:
        return have_all_heard(rank, heard[rank.rank], "all-gather, cancelled")

    with ThreadPoolExecutor(len(heard)) as threads:
        assert set(threads.map(ask, shared.ranks)) == {agreed}
    assert shared.operations == ["all-gather, cancelled"]


def test_a_lone_rank_agrees_with_itself() -> None:
    assert have_all_heard(LoneRank(), True, "") is True
    assert have_all_heard(LoneRank(), False, "") is False


@pytest.mark.parametrize(
    ("rows", "asked"),
    [((CHAINED,), True), ((DECODE,), False), ((CHAINED, DECODE), False), ((), False)],
    ids=["a verifying row", "a decode", "both", "a heartbeat"],
)
def test_ranks_ask_one_another_before_a_verifying_row_that_is_alone(rows: tuple[PlanRow, ...], asked: bool) -> None:
    plan = StepPlan(5, 0, (), rows, 4, 3, feedback_posted=False, dummy=False)
    assert plan.may_be_cancelled is asked


def never(failure: RuntimeFailure) -> NoReturn:
    raise failure


@pytest.mark.parametrize(
    ("rows", "operations"),
    [
        ((CHAINED,), ["all-gather, cancelled"]),
        ((DECODE,), []),
        ((), ["all-reduce, heartbeat"]),
    ],
    ids=["a verifying row", "a decode", "a heartbeat"],
)
@pytest.mark.parametrize("kind", ["tensor", "experts"])
def test_what_ranks_exchange_beside_the_compute_follows_from_the_plan(
    kind: str, rows: tuple[PlanRow, ...], operations: list[str]
) -> None:
    """They leave out what all have heard of, and a plan that nobody can have cancelled never."""
    shared = ThreadRanks(2)
    plan = StepPlan(5, 0, (), rows, 4, 3, feedback_posted=False, dummy=False)

    def run(rank: ThreadRank) -> tuple[bool, str]:
        watchdog = Watchdog(60.0, lambda: False, never)
        of_stage = StageRanks(tensor=rank) if kind == "tensor" else StageRanks(experts=rank)
        joined = JoinedRanks(of_stage, agreeing=rank)
        is_left_out = joined.exchange_beforehand(plan, True, watchdog)
        assert joined.times.is_computing, "only what it did beforehand isn't counted"
        return is_left_out, "" if watchdog._watched is None else watchdog._watched.operation

    with ThreadPoolExecutor(2) as threads:
        found = set(threads.map(run, shared.ranks))
    assert found == {(rows == (CHAINED,), operations[0] if operations else "")}
    assert shared.operations == operations


def test_a_lone_rank_asks_nobody_and_leaves_out_what_it_has_heard_of() -> None:
    watchdog = Watchdog(60.0, lambda: False, never)
    plan = StepPlan(5, 0, (), (DECODE,), 4, 3, feedback_posted=False, dummy=False)
    for has_heard in (True, False):
        assert JoinedRanks(StageRanks()).exchange_beforehand(plan, has_heard, watchdog) is has_heard
