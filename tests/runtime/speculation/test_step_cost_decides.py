"""When drafts pay, by what a step costs: SmolLM2 on one core takes about 11.4 ms and 1.07 ms per padded token."""

import pytest

from stageline_runtime.speculation.step_cost import FREE, StepCost, expected_tokens

SMOLLM2 = StepCost(0.0114, 0.00107)


def test_two_measurements_make_the_line() -> None:
    cost = StepCost.of_two((1, 0.012), (16, 0.024), head_share=0.2)
    assert cost.token_seconds == pytest.approx(0.001)
    assert cost.fixed_seconds == pytest.approx(0.0112)
    assert StepCost.of_two((1, 0.012), (16, 0.011), head_share=0.2).token_seconds == 0.0


@pytest.mark.parametrize(
    ("num_rows", "acceptance", "length"),
    [(1, 0.9, 15), (1, 0.7, 3), (1, 0.3, 1), (1, 0.02, 0), (2, 0.9, 15), (2, 0.3, 0), (8, 0.7, 0), (8, 0.0, 0),
     (16, 0.7, 0)],
)  # fmt: skip
def test_the_fuller_a_plan_the_better_drafts_must_be(num_rows: int, acceptance: float, length: int) -> None:
    assert SMOLLM2.best_length(num_rows, 15, acceptance) == length


def test_a_lone_row_gives_what_its_drafts_are_worth() -> None:
    for acceptance in (0.0, 0.4, 0.95):
        expected = (1 + expected_tokens(7, acceptance)) / SMOLLM2.seconds(8)
        assert SMOLLM2.rate(1, 7, acceptance) == pytest.approx(expected)


def test_where_tokens_cost_nothing_a_lone_row_always_drafts() -> None:
    assert FREE.best_length(1, 15, 0.1) == 15
    assert StepCost(0.0, 1.0).best_length(1, 15, 1.0) == 0


def test_expected_tokens_are_the_sum_of_the_chances() -> None:
    assert expected_tokens(3, 0.5) == pytest.approx(0.875)
    assert expected_tokens(7, 1.0) == 7
