"""What drafts are held to: each floor is asked of the case it is for, and of nothing else."""

from typing import Any

import pytest

from stageline_bench.runtime.group.engine_host import RoundOrder
from stageline_bench.runtime.speculation import (
    FLOORS,
    Case,
    paced_case,
    speculation_cases,
    targets_of,
)

ORDER = RoundOrder(prompts=((1, 2, 3),), output_tokens=8)
ORDERS = dict.fromkeys(FLOORS, ORDER)


def floors_of(cases: tuple[Case, ...]) -> dict[str, tuple[int, dict[str, float]]]:
    """Of the cases that have any: how many requests run at once, and what is asked."""
    return {case.name: (len(case.order.prompts), case.floors) for case in cases if case.floors}


def test_two_stages_have_a_floor_for_every_prompt_for_wrong_drafts_and_for_a_full_group() -> None:
    assert floors_of(speculation_cases(ORDERS, 2)) == {
        "repeat, P = 2": (1, {"drafts": 2.0}),
        "spelling, P = 2": (1, {"drafts": 2.0}),
        "rename, P = 2": (1, {"drafts": 1.3}),
        "summary, P = 2": (1, {"drafts": 1.2}),
        "json, P = 2": (1, {"drafts": 0.97}),
        "chat, P = 2": (1, {"drafts": 0.97}),
        "chat, drafts always wrong, P = 2": (1, {"wrong": 0.93}),
        "all prompts, 16 requests, P = 2": (16, {"drafts": 0.98}),
    }


@pytest.mark.parametrize("stages", [1, 2])
def test_one_request_and_four_are_measured_at_both_lengths(stages: int) -> None:
    counts = {case.name: len(case.order.prompts) for case in speculation_cases(ORDERS, stages)}
    for name in FLOORS:
        assert counts[f"{name}, P = {stages}"] == 1
        assert counts[f"{name}, 4 requests, P = {stages}"] == 4
    assert not floors_of(speculation_cases(ORDERS, 1)), "one stage is there to be read"


@pytest.mark.parametrize(
    ("stages", "token_seconds", "is_first", "asked"),
    [(4, 0.001, True, {"drafts": 2.2}), (4, 0.0023, False, {}), (8, 0.001, True, {})],
)
def test_the_paced_floor_is_that_of_four_stages(
    stages: int, token_seconds: float, is_first: bool, asked: dict[str, float]
) -> None:
    case = paced_case(ORDER, stages, token_seconds, has_floor=is_first)
    assert (case.variants, case.floors) == (("plain", "drafts"), asked)


def test_a_floor_is_held_against_the_median_of_the_pairs() -> None:
    case = Case("chat", ORDER, ("plain", "drafts"), {"drafts": 1.1})
    rates: list[tuple[float, float]] = [(10.0, 13.0), (20.0, 22.0), (5.0, 2.0)]
    measured: list[dict[str, Any]] = [
        {"case": "chat", "tokens_per_second": {"plain": plain, "drafts": drafts}} for plain, drafts in rates
    ]
    (target,) = targets_of([case], [*measured, {"case": "other", "tokens_per_second": {}}], "here")
    assert (target.name, target.measured, target.met) == (
        "chat, here: tokens per second, drafts / plain",
        1.1,
        True,
    )
