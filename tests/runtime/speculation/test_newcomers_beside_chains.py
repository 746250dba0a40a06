"""A request that comes while another's chain of guesses fills the stages: how long it waits for its first token.

The real scheduler over stages whose time is computed. A newcomer may find a row that the first stage computes, chains
or not; beside a chain it finds at most one more, which waits there.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.timed_pipeline import TimedPipeline
from stageline_bench.runtime.group.scripted_drafts import ScriptedSpeculation
from stageline_runtime.plan_bus.messages import StepPlan
from stageline_runtime.plan_bus.step_plan import padded_size
from stageline_runtime.speculation.step_cost import StepCost

STEP_SECONDS, TOKEN_SECONDS = 0.020, 0.001
MOMENTS = 24
"""At which a newcomer may come, over the length of a chain's beginning."""


@dataclass(slots=True)
class WatchedPipeline(TimedPipeline):
    """Keeps the most guesses that ever waited before the first stage, those that were cancelled left out."""

    most_waiting: int = 0

    def _reach(self, stage: int, plan: StepPlan) -> None:
        TimedPipeline._reach(self, stage, plan)
        if stage == 0:
            waiting = [each for each in list(self._queues[0])[1:] if each.seq not in self._cancelled]
            self.most_waiting = max(self.most_waiting, sum(row.num_drafts > 0 for each in waiting for row in each.rows))

    @property
    def longest_row_seconds(self) -> float:
        """What the longest verifying row takes in one stage."""
        longest = max((row.num_tokens for plan in self.plans for row in plan.rows if row.num_drafts), default=0)
        return self.step_seconds + self.token_seconds * padded_size(longest)


def pipeline(num_stages: int, acceptance: float, *, chains: bool, engine_seconds: float = 0.0) -> WatchedPipeline:
    cost = StepCost(num_stages * STEP_SECONDS, num_stages * TOKEN_SECONDS)
    drafting = ScriptedSpeculation(15, 2, cost, chains=chains, acceptance=acceptance)
    return WatchedPipeline(num_stages, STEP_SECONDS, TOKEN_SECONDS, drafting, engine_seconds)


def longest_wait(num_stages: int, acceptance: float, *, chains: bool) -> tuple[float, float]:
    """How much longer than alone a newcomer waits at most, and what the longest row took in a stage."""
    alone = pipeline(num_stages, acceptance, chains=chains).run([(0.0, 1)])[0].first_token_seconds
    waits, rows = [], []
    for moment in range(MOMENTS):
        # From before the first row to when it is back; then the next chain begins.
        comes = alone * (0.9 + 1.5 * moment / MOMENTS)
        busy = pipeline(num_stages, acceptance, chains=chains)
        waits.append(busy.run([(0.0, 80), (comes, 1)])[1].first_token_seconds - alone)
        rows.append(busy.longest_row_seconds)
    return max(waits), max(rows)


@pytest.mark.parametrize("acceptance", [0.7, 0.95])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_a_newcomer_waits_at_most_one_stages_time_longer_than_without_chains(
    num_stages: int, acceptance: float
) -> None:
    without, lone_seconds = longest_wait(num_stages, acceptance, chains=False)
    assert 0 < without <= lone_seconds, "a row that has just begun"
    beside, row_seconds = longest_wait(num_stages, acceptance, chains=True)
    assert without < beside <= 2 * row_seconds, "the row that runs, and the one behind it"


@settings(deadline=None, max_examples=60)
@given(
    num_stages=st.integers(2, 8),
    acceptance=st.sampled_from([0.0, 0.5, 0.7, 0.95, 1.0]),
    engine_seconds=st.sampled_from([0.0, 0.001, 0.03]),
    newcomers=st.lists(st.floats(0.0, 2.0), max_size=3),
)
def test_never_more_than_one_guess_waits_before_the_first_stage(
    num_stages: int, acceptance: float, engine_seconds: float, newcomers: list[float]
) -> None:
    """Also where the engine takes longer to answer than a stage to compute."""
    busy = pipeline(num_stages, acceptance, chains=True, engine_seconds=engine_seconds)
    busy.run([(0.0, 60), *((moment, 1) for moment in newcomers)])
    assert busy.most_waiting <= 1
