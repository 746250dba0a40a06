"""What `make soak` calls a failure: each kind of wrong answer, each kind of growth; and what it lets pass."""

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import httpx
import pytest

from chaos.soak_answers import Answer, Choice, Judge, Token, what_is_missing
from chaos.soak_pipeline import MOST_ROUND_SECONDS, PipelineSoak, rounds
from chaos.soak_report import failures_of, report_lines
from chaos.soak_requests import KINDS, Request, requests_of
from chaos.soak_traffic import Traffic
from chaos.soak_vitals import MEBIBYTE, MOST_FILES, MOST_THREADS, Vitals, leak, lives

IDS: dict[Token, int] = {(97,): 0, (98,): 1, (99,): 2}
BODY = {"model": "tiny", "messages": [], "temperature": 0.0, "seed": 3, "max_tokens": 3, "stream": True}


def due() -> Answer:
    """Of two choices, three tokens each."""
    tokens = [(97,), (98,), (99,)]
    choices = {index: Choice(list(tokens), [-1.0, -2.0, -3.0], "abc", "length") for index in range(2)}
    return Answer(choices, {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}, 200, is_done=True)


def changed(change: Callable[[Answer], object]) -> Answer:
    answer = deepcopy(due())
    change(answer)
    return answer


def other_token(answer: Answer, logprob: float) -> None:
    answer.choices[1].tokens[1:] = [(99,), (97,)]
    answer.choices[1].logprobs[1:] = [logprob, -9.0]


WRONG: dict[str, Answer] = {
    "another token": changed(lambda answer: other_token(answer, -2.5)),
    "a token less": changed(lambda answer: answer.choices[0].tokens.pop()),
    "a token twice": changed(lambda answer: answer.choices[0].tokens.append((99,))),
    "another score": changed(lambda answer: answer.choices[0].logprobs.__setitem__(2, -3.1)),
    "another text": changed(lambda answer: setattr(answer.choices[1], "text", "ab")),
    "another end": changed(lambda answer: setattr(answer.choices[1], "finish", "stop")),
    "another usage": changed(lambda answer: answer.usage.update(completion_tokens=7)),
    "no usage": changed(lambda answer: answer.usage.clear()),
}


@pytest.mark.parametrize("seen", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_told_from_the_one_that_was_due(seen: Answer) -> None:
    found = Judge(IDS, temperature=0.0, seed=3).compare(due(), seen)
    assert found.difference, seen
    assert not found.parted


def test_the_same_answer_and_one_that_parts_at_a_near_tie_pass() -> None:
    judge = Judge(IDS, temperature=0.0, seed=3)
    same = judge.compare(due(), due())
    near = judge.compare(due(), changed(lambda answer: other_token(answer, -2.00001)))
    assert (same.difference, same.parted, near.difference, near.parted) == ("", False, "", True)


def test_noise_counts_in_a_near_tie_of_a_seeded_answer() -> None:
    """Equal log probabilities are no tie where the noise of both tokens differs."""
    seen = changed(lambda answer: other_token(answer, -2.0))
    assert Judge(IDS, temperature=1.0, seed=3).compare(due(), seen).difference


def test_of_a_client_that_left_only_a_beginning_is_due() -> None:
    def leave(answer: Answer) -> None:
        del answer.choices[1]
        answer.choices[0] = Choice([(97,)], [-1.0], "a")
        answer.usage, answer.is_done = {}, False

    judge, begun = Judge(IDS, temperature=0.0, seed=3), changed(leave)
    assert judge.compare(due(), begun, begun_only=True).difference == ""
    assert judge.compare(due(), begun).difference
    begun.choices[0] = Choice([(99,)], [-1.5], "c")
    assert judge.compare(due(), begun, begun_only=True).difference


BROKEN: dict[str, Callable[[Answer], object]] = {
    "an error event": lambda answer: answer.take_line('data: {"error": {"message": "broken"}}'),
    "a status": lambda answer: setattr(answer, "status", 503),
    "no end": lambda answer: setattr(answer, "is_done", False),
    "no reason to end": lambda answer: setattr(answer.choices[0], "finish", ""),
    "two reasons to end": lambda answer: setattr(answer.choices[0], "finish", "lengthlength"),
    "a choice less": lambda answer: answer.choices.pop(1),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN.keys())
def test_an_answer_that_is_not_whole_is_seen(damage: Callable[[Answer], object]) -> None:
    assert what_is_missing(due(), choices=2) == ""
    assert what_is_missing(changed(damage), choices=2)


def traffic(request: Request, was_away: bool = False) -> Traffic:
    return Traffic("http://nowhere", [request], IDS, lambda *_: was_away, due=[due()])


def test_a_refusal_is_due_where_the_request_is_malformed_and_nowhere_else() -> None:
    asked = traffic(Request("refused", BODY, is_refused=True))
    asked.judge(0, Answer(status=400, problem='{"error": {"message": "no"}}'))
    assert asked.tally.failures == []
    for wrong in (due(), Answer(status=500, problem='{"error": {}}'), Answer(status=400, problem="a traceback")):
        asked.judge(0, wrong)
    assert len(asked.tally.failures) == 3, asked.tally.failures
    other = traffic(Request("greedy", BODY))
    other.judge(0, Answer(status=400, problem='{"error": {"message": "no"}}'))
    assert len(other.tally.failures) == 1


def test_what_is_asked_follows_from_the_seed_and_has_every_kind() -> None:
    one, same, other = (requests_of(random.Random(seed), each=2) for seed in (1, 1, 2))
    assert one == same != other
    assert {kind: sum(request.kind == kind for request in one) for kind in KINDS} == dict.fromkeys(KINDS, 2)


FIRST = Vitals("gateway", 7, 70, 100 * MEBIBYTE, 20, 5)
GROWN = {
    "memory": replace(FIRST, resident=143 * MEBIBYTE),
    "descriptors": replace(FIRST, files=21 + MOST_FILES),
    "threads": replace(FIRST, threads=6 + MOST_THREADS),
}


@pytest.mark.parametrize(("what", "last"), GROWN.items(), ids=GROWN.keys())
def test_a_process_that_grows_is_a_failure(what: str, last: Vitals) -> None:
    state = PipelineSoak(seed=1, minutes=1, rests=[[FIRST], [FIRST], [last]])
    [failure] = failures_of(state)
    assert f"gateway (pid 7): {what} " in failure
    assert any(what in line for line in report_lines(state))


def test_a_process_that_shrinks_or_stays_is_none_and_another_of_its_role_is_not_compared_with_it() -> None:
    assert leak(FIRST, replace(FIRST, resident=FIRST.resident // 2, files=1, threads=1)) == ""
    successor = replace(GROWN["memory"], pid=8, start_ticks=80)
    reused = replace(GROWN["memory"], start_ticks=90)
    assert lives([[FIRST], [successor], [reused]]) == []


def test_near_ties_that_are_too_common_are_a_failure() -> None:
    state = PipelineSoak(seed=1, minutes=1)
    state.tally.answered["greedy"], state.tally.parted = 1000, 20
    assert failures_of(state) == []
    state.tally.parted = 21
    assert len(failures_of(state)) == 1


def test_rounds_are_equal_and_none_is_too_long() -> None:
    assert rounds(100) == [50, 50]
    hour = rounds(3600)
    assert sum(hour) == pytest.approx(3600)
    assert max(hour) <= MOST_ROUND_SECONDS


def test_a_connection_that_breaks_is_excused_by_nothing_but_the_gateway_s_death() -> None:
    """`Traffic` asks again then; a broken connection that is judged is a failure."""
    asked = traffic(Request("greedy", BODY))
    asked.judge(0, Answer(status=200, problem=repr(httpx.ReadError("")), lost_connection=True))
    assert len(asked.tally.failures) == 1
