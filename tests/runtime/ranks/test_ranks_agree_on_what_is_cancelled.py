"""Ranks hear of a cancelled plan at different moments, and all leave it out or none does."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from oracles.thread_ranks import ThreadRank, ThreadRanks
from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.ranks.agreement import have_all_heard
from stageline_runtime.ranks.protocol import LoneRank

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
