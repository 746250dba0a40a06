"""Requests over stages of 20 ms and a few ms a token, their drafts right with a known probability: against arithmetic.

The best length is that of who knows the acceptance; the engine has to find that out. Tokens cost 1 ms, or 2.3 as
on the Intel core of docs/dev/benchmarks.md, where layers and head of the demo model took 29.0, 35.1, 49.5 and 74 ms for
1, 4, 8 and 16 rows: a ninth of the fixed part each.
"""

from random import Random

import pytest

from oracles.timed_pipeline import PROMPT, TimedPipeline
from stageline_bench.runtime.group.scripted_drafts import ScriptedSpeculation
from stageline_runtime.speculation.step_cost import StepCost

STEP_SECONDS = 0.020
CHEAP, DEAR = 0.001, 0.0023
NUM_TOKENS = 600


def rate(num_stages: int, acceptance: float, *, num_requests: int = 1, token_seconds: float = CHEAP) -> float:
    """Tokens per second of a request with drafts."""
    cost = StepCost(num_stages * STEP_SECONDS, num_stages * token_seconds)
    drafting = ScriptedSpeculation(15, 2, cost, acceptance=acceptance)
    drafted = TimedPipeline(num_stages, STEP_SECONDS, token_seconds, drafting)
    return drafted.tokens_per_second(NUM_TOKENS, num_requests)


def gain(num_stages: int, acceptance: float, *, num_requests: int = 1) -> float:
    """Tokens per second of a request with drafts over those without."""
    plain = TimedPipeline(num_stages, STEP_SECONDS, CHEAP).tokens_per_second(30, num_requests)
    return rate(num_stages, acceptance, num_requests=num_requests) / plain


def best_rate(num_stages: int, acceptance: float, token_seconds: float) -> float:
    """With rows of the best length: the newest token and drafts fill a padded size."""
    return max(
        sum(acceptance**place for place in range(size)) / (num_stages * (STEP_SECONDS + token_seconds * size))
        for size in (1, 2, 4, 8, 16)
    )


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
@pytest.mark.parametrize("acceptance", [0.7, 0.95])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_lengths_are_found_out(num_stages: int, acceptance: float, token_seconds: float) -> None:
    found = rate(num_stages, acceptance, token_seconds=token_seconds)
    best = best_rate(num_stages, drawn_acceptance(acceptance), token_seconds)
    assert 0.9 * best <= found <= 1.05 * best, (found, best)


def test_drafts_more_than_double_the_rate_at_four_stages() -> None:
    assert gain(4, 0.7) >= 2.2


def test_drafts_that_are_always_wrong_cost_next_to_nothing() -> None:
    assert gain(4, 0.0) >= 0.97


@pytest.mark.parametrize(("num_requests", "at_least"), [(2, 4.0), (4, 3.0), (8, 2.0), (16, 1.2)])
def test_requests_that_step_together_learn_that_their_drafts_hold(num_requests: int, at_least: float) -> None:
    """None of them would pay for trying: what they would have drafted tells them."""
    assert gain(2, 0.95, num_requests=num_requests) >= at_least


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7])
def test_full_cohorts_lose_nothing_by_drafts_that_do_not_pay(acceptance: float) -> None:
    assert gain(2, acceptance, num_requests=16) >= 0.97
