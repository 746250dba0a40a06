"""How long drafts get, by how the ones before went."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.plan_bus.step_plan import padded_size
from stageline_runtime.speculation.draft_length import PROBE_TOKENS, DraftLength


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
        (15, [0, 0, 0], [3, 1, 0]),
        (15, [-1, -1, -1, 0, 0, 0, 0], [7, 15, 15, 15, 7, 3, 1]),
        (15, [0, -1, 0, 0, 0], [3, 7, 7, 3, 1]),
        (15, [0, 0, 0, *[None] * PROBE_TOKENS], [3, 1, 0, *[0] * (PROBE_TOKENS - 1), 3]),
        (15, [0, 0, 0, *[None] * PROBE_TOKENS, 0], [3, 1, 0, *[0] * (PROBE_TOKENS - 1), 3, 0]),
        (15, [0, 0, 0, *[None] * PROBE_TOKENS, -1], [3, 1, 0, *[0] * (PROBE_TOKENS - 1), 3, 7]),
    ],
)  # fmt: skip
def test_examples(most: int, held: list[int | None], expected: list[int]) -> None:
    assert lengths(most, held) == expected


def test_misses_after_a_long_copy_tell_that_it_is_over() -> None:
    length = DraftLength(15)
    for _ in range(50):
        length.note_row(15, 15)
    misses = 0
    while length.length:
        length.note_row(length.length, 0)
        misses += 1
    assert misses <= 16


@given(most=st.integers(1, 16), shares=st.lists(st.none() | st.floats(0, 1), max_size=60))
def test_it_stays_between_nothing_and_most(most: int, shares: list[float | None]) -> None:
    length = DraftLength(most)
    for share in shares:
        if share is None or not length.length:
            length.note_plain_token()
        else:
            length.note_row(length.length, round(share * length.length))
        assert 0 <= length.length <= most
        assert 0.0 <= length.acceptance <= 1.0


def test_full_lengths_fill_the_sizes_that_plans_are_padded_to() -> None:
    grown = [3, *lengths(15, [-1, -1])]
    assert [padded_size(length + 1) for length in grown] == [length + 1 for length in grown]
