"""How long drafts get, by how the ones before went."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.plan_bus.step_plan import padded_size
from stageline_runtime.speculation.draft_length import LEAST_ACCEPTANCE, PROBE_TOKENS, DraftLength

MISSED = [3, 1, 1, 1, 1, 1, 1, 0]
"""After each of the first rows without a hit."""


def lengths(most: int, held: list[int | None]) -> list[int]:
    """After each row: so many of its drafts held; -1 all of them, None a decode row without drafts."""
    length, seen = DraftLength(most), []
    for each in held:
        if each is None:
            length.note_plain_token()
        else:
            length.note_row(length.length, length.length if each == -1 else each)
        seen.append(length.length)
    return seen


@pytest.mark.parametrize(
    ("most", "held", "expected"),
    [
        (15, [-1, -1, -1], [7, 15, 15]),
        (16, [-1, -1, -1], [7, 15, 16]),
        (4, [-1], [4]),
        (1, [-1, 0], [1, 1]),
        (15, [-1, 4, 2, 0, 1], [7, 7, 7, 7, 7]),
        (15, [0] * 8, MISSED),
        (15, [-1, -1, -1, 0, 0, 0, 0], [7, 15, 15, 15, 7, 3, 1]),
        (15, [0, -1, 0, 0, 0], [3, 7, 7, 3, 1]),
        (15, [*[0] * 8, *[None] * PROBE_TOKENS], [*MISSED, *[0] * (PROBE_TOKENS - 1), 3]),
        (15, [*[0] * 8, *[None] * PROBE_TOKENS, 0], [*MISSED, *[0] * (PROBE_TOKENS - 1), 3, 0]),
        (15, [*[0] * 8, *[None] * PROBE_TOKENS, -1], [*MISSED, *[0] * (PROBE_TOKENS - 1), 3, 7]),
    ],
)  # fmt: skip
def test_examples(most: int, held: list[int | None], expected: list[int]) -> None:
    assert lengths(most, held) == expected


@pytest.mark.parametrize(
    ("most", "guesses", "expected"),
    [
        (15, "yyyyyy", 3),
        (15, "yyyyyyy", 7),
        (15, "y" * 15, 15),
        (16, "y" * 16, 16),
        (5, "yyyyy", 5),
        (15, "yyyyyynyyyyyy", 3),
        (15, "n" * 40, 3),
    ],
)
def test_guesses_that_would_have_held_in_a_row_make_it_as_long(most: int, guesses: str, expected: int) -> None:
    length = DraftLength(most)
    for each in guesses:
        length.note_guess(holds=each == "y")
    assert length.length == expected


def test_what_has_stopped_begins_again_after_three_guesses_in_a_row_that_would_have_held() -> None:
    length = DraftLength(15)
    while length.length:
        length.note_row(length.length, 0)
    for each, expected in zip("nyynyyyn", (0, 0, 0, 0, 0, 0, 3, 3), strict=True):
        length.note_guess(holds=each == "y")
        assert length.length == expected
    length.note_row(3, 0)
    assert length.length == 0 or length.acceptance >= LEAST_ACCEPTANCE, "one more miss stops what seldom held"


def test_guesses_tell_the_acceptance_without_a_draft_being_sent() -> None:
    holding, wrong = DraftLength(15), DraftLength(15)
    for _ in range(30):
        holding.note_guess(holds=True)
        wrong.note_guess(holds=False)
    assert holding.acceptance > 0.95
    assert wrong.acceptance < 0.05


def test_the_more_would_pay_for_a_mistake_the_less_a_lucky_streak_is_believed() -> None:
    length = DraftLength(15)
    for each in "yyynyy":
        length.note_guess(holds=each == "y")
    believed = [length.acceptance_beside(others) for others in (0, 1, 3, 7)]
    assert believed[0] == length.acceptance
    assert believed == sorted(believed, reverse=True)
    for _ in range(50):
        length.note_guess(holds=True)
    assert length.acceptance_beside(7) > 0.9


def test_misses_after_a_long_copy_tell_that_it_is_over() -> None:
    length = DraftLength(15)
    for _ in range(50):
        length.note_row(15, 15)
    misses = 0
    while length.length:
        length.note_row(length.length, 0)
        misses += 1
    assert misses <= 24, "most of them with a single draft"


@given(most=st.integers(1, 16), shares=st.lists(st.none() | st.booleans() | st.floats(0, 1), max_size=60))
def test_it_stays_between_nothing_and_most(most: int, shares: list[float | bool | None]) -> None:
    length = DraftLength(most)
    for share in shares:
        if isinstance(share, bool):
            length.note_guess(holds=share)
        elif share is None or not length.length:
            length.note_plain_token()
        else:
            length.note_row(length.length, round(share * length.length))
        assert 0 <= length.length <= most
        assert 0.0 <= length.acceptance <= 1.0


def test_full_lengths_fill_the_sizes_that_plans_are_padded_to() -> None:
    grown = [3, *lengths(15, [-1, -1])]
    assert [padded_size(length + 1) for length in grown] == [length + 1 for length in grown]
