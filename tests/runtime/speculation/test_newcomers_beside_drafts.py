"""A request that comes while another's drafts are verified: how long it waits for its first token.

The real scheduler over stages whose time is computed. A newcomer may find a row that the first stage has just begun.
"""

import pytest

from oracles.timed_pipeline import TimedPipeline
from stageline_bench.runtime.group.scripted_drafts import ScriptedSpeculation
from stageline_runtime.plan_bus.step_plan import padded_size
from stageline_runtime.speculation.step_cost import StepCost

STEP_SECONDS, TOKEN_SECONDS = 0.020, 0.001
MOMENTS = 24
"""At which a newcomer may come, over the time of a row."""


def pipeline(num_stages: int, acceptance: float) -> TimedPipeline:
    cost = StepCost(num_stages * STEP_SECONDS, num_stages * TOKEN_SECONDS)
    drafting = ScriptedSpeculation(15, 2, cost, acceptance=acceptance)
    return TimedPipeline(num_stages, STEP_SECONDS, TOKEN_SECONDS, drafting)


def longest_row_seconds(busy: TimedPipeline) -> float:
    """What the longest verifying row takes in one stage."""
    longest = max(row.num_tokens for plan in busy.plans for row in plan.rows if row.num_drafts)
    return STEP_SECONDS + TOKEN_SECONDS * padded_size(longest)


@pytest.mark.parametrize("acceptance", [0.7, 0.95])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_a_newcomer_waits_for_no_more_than_the_row_that_runs(num_stages: int, acceptance: float) -> None:
    alone = pipeline(num_stages, acceptance).run([(0.0, 1)])[0].first_token_seconds
    waits = []
    for moment in range(MOMENTS):
        busy = pipeline(num_stages, acceptance)
        comes = alone * (0.9 + 1.5 * moment / MOMENTS)
        waits.append(busy.run([(0.0, 80), (comes, 1)])[1].first_token_seconds - alone)
        assert waits[-1] <= longest_row_seconds(busy) + 1e-9, (comes, waits)
    assert max(waits) > 0, waits
