"""Requests over stages of 20 ms and a few ms a token, their drafts right with a known probability: against arithmetic.

The best is found by search, by who knows the acceptance; the engine has to find that out. Tokens cost 1 ms, or 2.3 as
on the Intel core of docs/log.md, where layers and head of the demo model took 29.0, 35.1, 49.5 and 74 ms for 1, 4, 8
and 16 rows: a ninth of the fixed part each.
"""

from random import Random

import pytest

from oracles.best_rows import TimedStages
from oracles.timed_pipeline import PROMPT, TimedPipeline
from stageline_bench.runtime.group.scripted_drafts import ScriptedSpeculation
from stageline_runtime.speculation.step_cost import StepCost

STEP_SECONDS = 0.020
CHEAP, DEAR = 0.001, 0.0023
NUM_TOKENS = 600


def rate(
    num_stages: int, acceptance: float, *, chains: bool, num_requests: int = 1, token_seconds: float = CHEAP
) -> float:
    """Tokens per second of a request with drafts."""
    cost = StepCost(num_stages * STEP_SECONDS, num_stages * token_seconds)
    drafting = ScriptedSpeculation(15, 2, cost, chains=chains, acceptance=acceptance)
    drafted = TimedPipeline(num_stages, STEP_SECONDS, token_seconds, drafting)
    return drafted.tokens_per_second(NUM_TOKENS, num_requests)


def gain(num_stages: int, acceptance: float, *, chains: bool, num_requests: int = 1) -> float:
    """Tokens per second of a request with drafts over those without."""
    plain = TimedPipeline(num_stages, STEP_SECONDS, CHEAP).tokens_per_second(30, num_requests)
    return rate(num_stages, acceptance, chains=chains, num_requests=num_requests) / plain


def best_rate(num_stages: int, acceptance: float, *, chains: bool, token_seconds: float = CHEAP) -> float:
    stages = TimedStages(num_stages, STEP_SECONDS, token_seconds)
    return (stages.best_rate_of_chains if chains else stages.best_rate_of_single_rows)(acceptance)


def drawn_acceptance(acceptance: float) -> float:
    """Which share of the scripted drafts holds, in the places of one answer."""
    first = len(PROMPT) + 1
    return sum(Random(place).random() < acceptance for place in range(first, first + NUM_TOKENS)) / NUM_TOKENS


def test_without_drafts_a_token_takes_a_whole_round() -> None:
    rate = TimedPipeline(4, STEP_SECONDS, CHEAP).tokens_per_second(30)
    assert rate == pytest.approx(1 / (4 * (STEP_SECONDS + CHEAP)))


def test_without_drafts_requests_that_have_a_stage_each_do_not_slow_each_other_down() -> None:
    one, four = (TimedPipeline(4, STEP_SECONDS, CHEAP).tokens_per_second(30, count) for count in (1, 4))
    assert four == pytest.approx(one, rel=0.02), "but for what their prompts take"


@pytest.mark.parametrize("token_seconds", [CHEAP, DEAR])
@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("acceptance", [0.7, 0.95])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_lengths_and_chains_are_found_out(
    num_stages: int, acceptance: float, chains: bool, token_seconds: float
) -> None:
    found = rate(num_stages, acceptance, chains=chains, token_seconds=token_seconds)
    best = best_rate(num_stages, drawn_acceptance(acceptance), chains=chains, token_seconds=token_seconds)
    assert 0.9 * best <= found <= 1.05 * best, (found, best)


@pytest.mark.parametrize(
    ("num_stages", "token_seconds", "most"),
    [(2, CHEAP, 1.07), (4, CHEAP, 1.15), (8, CHEAP, 1.21), (2, DEAR, 1.14), (4, DEAR, 1.26), (8, DEAR, 1.40)],
)
def test_what_chains_can_win_at_most(num_stages: int, token_seconds: float, most: float) -> None:
    """At an acceptance of 0.7, over the best rows without chains: no choice of lengths wins more."""
    for pads in (True, False):
        stages = TimedStages(num_stages, STEP_SECONDS, token_seconds, pads)
        ratio = stages.best_rate_of_chains(0.7) / stages.best_rate_of_single_rows(0.7)
        assert most - 0.03 <= ratio <= most


@pytest.mark.parametrize("num_stages", [4, 8])
@pytest.mark.parametrize("token_seconds", [CHEAP, DEAR])
def test_a_chain_of_equal_rows_is_as_good_as_any(num_stages: int, token_seconds: float) -> None:
    """So the cost model, which knows no others, leaves nothing on the table."""
    cost = StepCost(num_stages * STEP_SECONDS, num_stages * token_seconds)
    best = max(cost.rate(1, length, 0.7, num_stages) for length in (1, 3, 7, 15))
    assert best == pytest.approx(best_rate(num_stages, 0.7, chains=True, token_seconds=token_seconds), rel=0.01)


@pytest.mark.parametrize(
    ("num_stages", "token_seconds", "at_least"), [(4, CHEAP, 1.12), (8, CHEAP, 1.2), (4, DEAR, 1.2), (8, DEAR, 1.3)]
)
def test_chains_win_nearly_that(num_stages: int, token_seconds: float, at_least: float) -> None:
    chained, single = (rate(num_stages, 0.7, chains=chains, token_seconds=token_seconds) for chains in (True, False))
    assert chained >= at_least * single


def test_drafts_win_two_and_a_half_times_at_four_stages() -> None:
    assert gain(4, 0.7, chains=True) >= 2.5


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
