"""Requests over stages of 20 ms and 1 ms a token, their drafts right with a known probability: against arithmetic.

The best is that of one length held throughout, chosen by who knows the acceptance; the engine has to find both out.
"""

import pytest

from oracles.timed_pipeline import TimedPipeline
from stageline_bench.runtime.scripted_drafts import ScriptedSpeculation
from stageline_runtime.speculation.step_cost import StepCost

STEP_SECONDS, TOKEN_SECONDS = 0.020, 0.001
NUM_TOKENS = 600


def gain(num_stages: int, acceptance: float, *, chains: bool, num_requests: int = 1) -> float:
    """Tokens per second of a request with drafts over those without."""
    cost = StepCost(num_stages * STEP_SECONDS, num_stages * TOKEN_SECONDS)
    drafting = ScriptedSpeculation(15, 2, cost, chains=chains, acceptance=acceptance)
    drafted = TimedPipeline(num_stages, STEP_SECONDS, TOKEN_SECONDS, drafting)
    plain = TimedPipeline(num_stages, STEP_SECONDS, TOKEN_SECONDS)
    return drafted.tokens_per_second(NUM_TOKENS, num_requests) / plain.tokens_per_second(30, num_requests)


def best_gain(num_stages: int, acceptance: float, *, chains: bool) -> float:
    depth = num_stages if chains else 1
    cost = StepCost(STEP_SECONDS, TOKEN_SECONDS)
    return max(cost.rate(1, length, acceptance, depth) for length in (1, 3, 7, 15)) * cost.seconds(1)


def test_without_drafts_a_token_takes_a_whole_round() -> None:
    rate = TimedPipeline(4, STEP_SECONDS, TOKEN_SECONDS).tokens_per_second(30)
    assert rate == pytest.approx(1 / (4 * (STEP_SECONDS + TOKEN_SECONDS)))


def test_without_drafts_requests_that_have_a_stage_each_do_not_slow_each_other_down() -> None:
    one, four = (TimedPipeline(4, STEP_SECONDS, TOKEN_SECONDS).tokens_per_second(30, count) for count in (1, 4))
    assert four == pytest.approx(one, rel=0.02), "but for what their prompts take"


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("acceptance", [0.7, 0.95])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_lengths_and_chains_are_found_out(num_stages: int, acceptance: float, chains: bool) -> None:
    found, best = (of(num_stages, acceptance, chains=chains) for of in (gain, best_gain))
    assert 0.85 * best <= found <= 1.25 * best, (found, best)


def test_chains_win_a_tenth_at_four_stages() -> None:
    assert gain(4, 0.7, chains=True) >= 2.5
    assert gain(4, 0.7, chains=True) >= 1.1 * gain(4, 0.7, chains=False)


@pytest.mark.parametrize("chains", [False, True])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(chains: bool) -> None:
    assert gain(4, 0.0, chains=chains) >= 0.97


@pytest.mark.parametrize(("num_requests", "at_least"), [(2, 4.0), (4, 3.0), (8, 2.0), (16, 1.2)])
def test_requests_that_step_together_learn_that_their_drafts_hold(num_requests: int, at_least: float) -> None:
    """None of them would pay for trying: what they would have drafted tells them."""
    assert gain(2, 0.95, chains=True, num_requests=num_requests) >= at_least


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7])
def test_full_cohorts_lose_nothing_by_drafts_that_do_not_pay(acceptance: float) -> None:
    assert gain(2, acceptance, chains=True, num_requests=16) >= 0.97
