"""Prompt lookup against its definition, computed the slow way, and what one update costs."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.speculation.lookup import NGRAM_SIZES, TOKENS_PER_CALL, Lookup
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import FREE


def slow_drafts(tokens: Sequence[int], min_match: int, count: int) -> tuple[int, ...]:
    """Search: the longest indexed n-gram at the end that was seen before, its last place, what followed."""
    for size in range(min_match + NGRAM_SIZES - 1, min_match - 1, -1):
        end = list(tokens[-size:])
        places = [at + size for at in range(len(tokens) - size) if list(tokens[at : at + size]) == end]
        if len(tokens) > size and places:
            found: list[int] = []
            while len(found) < count:
                found.append([*tokens, *found][places[-1] + len(found)])
            return tuple(found)
    return ()


@given(tokens=st.lists(st.integers(0, 3), max_size=40), min_match=st.integers(1, 4), count=st.integers(0, 16))
def test_drafts_are_what_a_search_would_find(tokens: list[int], min_match: int, count: int) -> None:
    lookup = Lookup(min_match)
    for end, token in enumerate(tokens, start=1):
        lookup.extend([token])
        assert lookup.drafts(count) == slow_drafts(tokens[:end], min_match, count)


@pytest.mark.parametrize(
    ("tokens", "min_match", "drafts"),
    [
        ((), 1, ()),
        ((1,), 1, ()),
        ((1, 2, 3, 1, 2), 2, (3, 1, 2, 3, 1)),
        ((1, 2, 3, 1, 2), 3, ()),
        ((5, 5), 1, (5, 5, 5, 5, 5)),
        ((1, 2, 7, 1, 2, 8, 1, 2), 2, (8, 1, 2, 8, 1)),
        ((9, 1, 2, 7, 1, 2, 8, 9, 1, 2), 2, (7, 1, 2, 8, 9)),
    ],
    ids=["nothing", "one", "period", "too-short-a-match", "one-repeated", "latest-place", "longest-match-first"],
)
def test_examples(tokens: tuple[int, ...], min_match: int, drafts: tuple[int, ...]) -> None:
    lookup = Lookup(min_match)
    lookup.extend(tokens)
    assert lookup.drafts(5) == drafts


def test_a_long_prompt_is_taken_in_parts() -> None:
    """No draft before all of it is known to the index, and no call takes more than its share."""
    prompt = tuple(range(100)) * (3 * TOKENS_PER_CALL // 100)
    taken: list[int] = []

    def tokens(start: int, stop: int) -> tuple[int, ...]:
        taken.append(stop - start)
        return prompt[start:stop]

    drafts = Speculation(7, 2, FREE).of_request()
    proposals = [drafts.propose(len(prompt), tokens, 1) for _ in range(5)]
    assert max(taken) <= TOKENS_PER_CALL
    assert proposals[:2] == [(), ()]
    assert proposals[-1] == (0, 1, 2)
