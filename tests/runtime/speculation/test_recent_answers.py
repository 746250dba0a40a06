"""What is copied from answers that have ended, by whom, and how many of them are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.speculation.recent_answers import (
    MOST_ANSWER_TOKENS,
    MOST_LOOKED_AT,
    PREFIX_TOKENS,
    RecentAnswers,
    key_of,
)
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import FREE

PREFIX = tuple(range(100, 100 + PREFIX_TOKENS))
QUESTION, OTHER_QUESTION = (*PREFIX, 1, 2, 3, 50, 51), (*PREFIX, 7, 8, 9, 50, 51)
ANSWER = tuple(range(10, 30))
TOKENS = st.lists(st.integers(0, 3), max_size=30).map(tuple)


def following(
    answers: RecentAnswers, prompt: tuple[int, ...], said: tuple[int, ...], salt: str = ""
) -> tuple[int, ...]:
    found = answers.match(key_of(prompt, salt), (*prompt, *said)[-answers.longest :], longer_than=0)
    return () if found is None else found.following(4)


@pytest.mark.parametrize(
    ("prompt", "said", "salt", "copied"),
    [
        pytest.param(QUESTION, (), "", ANSWER[:4], id="the same question, from its first token on"),
        pytest.param(OTHER_QUESTION, (), "", (), id="another one ends alike: a template's words say nothing"),
        pytest.param(OTHER_QUESTION, ANSWER[5:6], "", ANSWER[6:10], id="another one that comes to the same words"),
        pytest.param(QUESTION, ANSWER[:-2], "", ANSWER[-2:], id="no further than the answer went"),
        pytest.param(QUESTION, ANSWER, "", (), id="nothing behind its end"),
        pytest.param(QUESTION, (), "mine", (), id="another salt"),
        pytest.param((99, *QUESTION[1:]), ANSWER[:5], "", (), id="another beginning"),
    ],
)
def test_what_an_answer_gives(
    prompt: tuple[int, ...], said: tuple[int, ...], salt: str, copied: tuple[int, ...]
) -> None:
    answers = RecentAnswers(4, 1)
    answers.note_answer(QUESTION, "", ANSWER)
    assert following(answers, prompt, said, salt) == copied


def test_the_longest_match_decides_and_of_equal_ones_the_newest() -> None:
    answers = RecentAnswers(4, 1)
    answers.note_answer(QUESTION, "", (*ANSWER[:9], 90))
    answers.note_answer(QUESTION, "", (41, 42, ANSWER[8], 91))
    assert following(answers, QUESTION, ANSWER[:9]) == (90,)
    assert following(answers, QUESTION, (60, 61, ANSWER[8])) == (91,)


def test_a_request_that_knows_as_many_tokens_itself_copies_itself() -> None:
    answers = RecentAnswers(4, 1)
    answers.note_answer(QUESTION, "", ANSWER)
    end = (*QUESTION, 80, *ANSWER[:2])[-answers.longest :]
    found = answers.match(key_of(QUESTION, ""), end, longer_than=1)
    assert found is not None
    assert (found.size, found.following(4)) == (2, ANSWER[2:6])
    assert answers.match(key_of(QUESTION, ""), end, longer_than=2) is None


def test_the_answer_that_gave_no_draft_for_longest_goes_first() -> None:
    answers = RecentAnswers(2, 1)
    prompts = [(*(PREFIX[1:]), number, 50) for number in range(3)]
    for prompt in prompts[:2]:
        answers.note_answer(prompt, "", ANSWER)
    assert following(answers, prompts[0], ANSWER[:3]) == ANSWER[3:7]
    answers.note_answer(prompts[2], "", ANSWER)
    assert [bool(following(answers, prompt, ANSWER[:3])) for prompt in prompts] == [True, False, True]
    assert len(answers) == 2


def test_a_long_answer_is_kept_in_part_and_few_of_one_kind_are_looked_at() -> None:
    answers = RecentAnswers(64, 1)
    answers.note_answer(QUESTION, "", tuple(range(1000, 1000 + MOST_ANSWER_TOKENS + 50)))
    assert following(answers, QUESTION, (1000 + MOST_ANSWER_TOKENS - 1,)) == ()
    assert following(answers, QUESTION, (1005,)) == (1006, 1007, 1008, 1009)
    for number in range(MOST_LOOKED_AT):
        answers.note_answer(QUESTION, "", (number, number))
    assert following(answers, QUESTION, (1005,)) == ()


@given(
    st.integers(0, 5),
    st.integers(1, 3),
    st.lists(st.tuples(TOKENS.filter(bool), st.sampled_from(["", "a"]), TOKENS), max_size=12),
    TOKENS.filter(bool),
    st.sampled_from(["", "a"]),
    TOKENS,
)
def test_no_more_are_kept_and_nothing_is_copied_but_what_followed_there(
    most: int,
    min_match: int,
    ended: list[tuple[tuple[int, ...], str, tuple[int, ...]]],
    prompt: tuple[int, ...],
    salt: str,
    said: tuple[int, ...],
) -> None:
    """Of answers with equal beginning and salt alone; the match is really at the end, and really followed by that."""
    answers = RecentAnswers(most, min_match)
    for answer in ended:
        answers.note_answer(*answer)
    assert len(answers) <= most
    known = (*prompt, *said)
    found = answers.match(key_of(prompt, salt), known[-answers.longest :], longer_than=0)
    if found is None:
        return
    sought = (*known[-found.size :], *found.following(3))
    mine = [
        (*asked[-answers.longest :], *output)
        for asked, of_salt, output in ended
        if of_salt == salt and asked[:PREFIX_TOKENS] == prompt[:PREFIX_TOKENS]
    ]
    assert found.size >= min_match
    assert any(sought == whole[at : at + len(sought)] for whole in mine for at in range(len(whole))), (mine, found)


@pytest.mark.parametrize(("kept", "drafts"), [(0, ()), (2, ANSWER[:3])])
def test_a_request_drafts_from_them_where_they_are_kept(kept: int, drafts: tuple[int, ...]) -> None:
    speculation = Speculation(3, 1, FREE, num_recent_answers=kept)
    speculation.note_answer(QUESTION, "", ANSWER)
    request = speculation.of_request(QUESTION)
    assert request.propose(len(QUESTION), lambda start, stop: QUESTION[start:stop], 1) == drafts
