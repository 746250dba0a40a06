"""Stages of a fixed time, computed and not waited for: how soon newcomers are answered, and that nobody is held up.

Each rule is broken once, and the figure that it is for is then missed.
"""

from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.timed_pipeline import Answer, TimedPipeline
from stageline_runtime.engine.scheduling import scheduler as scheduler_module
from stageline_runtime.engine.scheduling.row_selection import Occasion, occasion_of
from stageline_runtime.engine.scheduling.slot_assignment import Cohorts

STEP_SECONDS, TOKEN_SECONDS, ENGINE_SECONDS = 0.020, 0.0001, 0.001
NUM_TOKENS = 32
JOINING = [(0.05 * index, 60) for index in range(4)]


def pipeline(num_stages: int, slots: int = 16) -> TimedPipeline:
    return TimedPipeline(
        num_stages,
        STEP_SECONDS,
        TOKEN_SECONDS,
        engine_seconds=ENGINE_SECONDS,
        slots_per_cohort=slots,
        max_step_tokens=512,
    )


def slowest_share(num_stages: int, arrivals: list[tuple[float, int]]) -> float:
    """The least tokens a second of them, of what a request alone gets."""
    alone = pipeline(num_stages).tokens_per_second(60)
    return min(answer.tokens_per_second for answer in pipeline(num_stages).run(arrivals)) / alone


def arriving(requests_per_stage: float, num_stages: int = 4) -> list[Answer]:
    """Answers to 120 requests that come at random, so many at a time for each stage on the average."""
    draw, moment, arrivals = Random("arriving"), 0.0, []
    rate = requests_per_stage / (NUM_TOKENS * (STEP_SECONDS + TOKEN_SECONDS))
    for _ in range(120):
        arrivals.append((moment, NUM_TOKENS))
        moment += draw.expovariate(rate)
    return pipeline(num_stages).run(arrivals)


def first_token_ratio(answers: list[Answer], num_stages: int = 4) -> float:
    """The median time to the first token, of what it is in an empty pipeline."""
    (empty,) = pipeline(num_stages).run([(0.0, 1)])
    return median(answer.first_token_seconds for answer in answers) / empty.first_token_seconds


def never_hold_back(seq: int, unfinished: list[int], num_stages: int, num_running: int, **_: bool) -> Occasion:
    real = occasion_of(seq, unfinished, num_stages, num_running)
    return Occasion(seq - 1, real.begins_for_others)


def never_begin_for_others(seq: int, unfinished: list[int], num_stages: int, num_running: int, **_: bool) -> Occasion:
    return Occasion(occasion_of(seq, unfinished, num_stages, num_running).awaits_through, False)


def never_let_go(*_: object, **__: object) -> Occasion:
    return Occasion(-1, False)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_requests_that_join_one_after_another_are_as_fast_as_one_alone(num_stages: int) -> None:
    assert slowest_share(num_stages, JOINING[:num_stages]) >= 0.95


@given(data=st.data(), num_stages=st.integers(2, 6))
def test_whenever_requests_come_nobody_with_a_stage_to_spare_is_held_up(data: st.DataObject, num_stages: int) -> None:
    moments = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=num_stages))
    assert slowest_share(num_stages, [(moment / 1000, 60) for moment in moments]) >= 0.94, moments


@pytest.mark.parametrize(
    ("requests_per_stage", "at_most"), [(0.25, 1.1), (0.5, 1.2), (1.0, 1.3), (2.0, 1.45), (3.0, 1.45)]
)
def test_a_newcomer_is_answered_soon_at_any_load(requests_per_stage: float, at_most: float) -> None:
    assert first_token_ratio(arriving(requests_per_stage)) <= at_most


@pytest.mark.parametrize("num_requests", [1, 4, 8, 16])
def test_requests_that_come_together_take_what_arithmetic_says(num_requests: int) -> None:
    """All cohorts alike: a round takes a decode row each of the largest, and nobody waits beyond it."""
    rows = -(-num_requests // 4)
    round_seconds = 4 * (STEP_SECONDS + TOKEN_SECONDS * rows)
    answers = pipeline(4).run([(0.0, 60)] * num_requests)
    slowest = max((answer.moments[-1] - answer.moments[0]) / 59 for answer in answers)
    assert slowest == pytest.approx(round_seconds, rel=0.03)


def test_decodes_never_held_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "occasion_of", never_hold_back)
    assert slowest_share(8, JOINING) < 0.7
    assert first_token_ratio(arriving(0.5)) > 1.5


def test_decodes_never_let_go_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "occasion_of", never_let_go)
    with pytest.raises(AssertionError, match=r"\[1, 1\]"):
        pipeline(3).run([(0.0, 9), (0.0, 9)])


def test_first_chunks_that_wait_for_their_own_turn_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    good = first_token_ratio(arriving(3.0))
    monkeypatch.setattr(scheduler_module, "occasion_of", never_begin_for_others)
    assert first_token_ratio(arriving(3.0)) > good + 0.05


def test_joining_the_first_cohort_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "occasion_of", never_begin_for_others)
    good = first_token_ratio(arriving(2.0))
    monkeypatch.setattr(Cohorts, "lightest", lambda self: self.sizes.index(min(self.sizes)))
    assert first_token_ratio(arriving(2.0)) > good + 0.1
