"""Ranks of a stage meet in heartbeats: one that stands still is found before a request needs it."""

from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest

from oracles.thread_ranks import ThreadRank, ThreadRanks
from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.ranks.stage_ranks import StageRanks
from stageline_runtime.stage.ranks.joining import JoinedRanks
from stageline_runtime.stage.telemetry.watchdog import Watchdog
from stageline_runtime.termination import RuntimeFailure

VERIFYING = PlanRow(0, 1, 30, 2, (7, 8), True, 1)
DECODE = PlanRow(1, 1, 30, 1, (), True)


def never(failure: RuntimeFailure) -> NoReturn:
    raise failure


def plan_of(rows: tuple[PlanRow, ...]) -> StepPlan:
    return StepPlan(5, 0, (), rows, 4, 3, feedback_posted=False, dummy=False)


@pytest.mark.parametrize(
    ("rows", "operation"),
    [((VERIFYING,), ""), ((DECODE,), ""), ((), "all-reduce, heartbeat")],
    ids=["a verifying row", "a decode", "a heartbeat"],
)
@pytest.mark.parametrize("kind", ["tensor", "experts"])
def test_ranks_exchange_beside_the_compute_in_heartbeats_alone(
    kind: str, rows: tuple[PlanRow, ...], operation: str
) -> None:
    shared = ThreadRanks(2)

    def run(rank: ThreadRank) -> str:
        watchdog = Watchdog(60.0, lambda: False, never)
        joined = JoinedRanks(StageRanks(tensor=rank) if kind == "tensor" else StageRanks(experts=rank))
        joined.meet(plan_of(rows), watchdog)
        assert joined.times.is_computing, "only what it did beforehand isn't counted"
        return "" if watchdog._watched is None else watchdog._watched.operation

    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(run, shared.ranks)) == {operation}
    assert shared.operations == ([operation] if operation else [])


def test_a_lone_rank_meets_nobody() -> None:
    watchdog = Watchdog(60.0, lambda: False, never)
    JoinedRanks(StageRanks()).meet(plan_of(()), watchdog)
    assert watchdog._watched is None
