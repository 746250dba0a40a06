"""What drafts win on texts that a model really wrote, over two stages of 13 ms and 0.7 ms a token.

The floors are a little below what these rules give; what machines give stands in docs/dev/benchmarks.md.
"""

import pytest

from oracles.replayed_answers import ReplayingPipeline, recorded_answers
from stageline_runtime.speculation.request_drafts import RequestDrafts, Tokens
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import StepCost

STEP_SECONDS, TOKEN_SECONDS, NUM_STAGES = 0.013, 0.0007, 2
ANSWERS = recorded_answers()


def gain(name: str, num_requests: int, min_match: int = 1) -> float:
    """Tokens per second of a request with drafts over those without."""
    cost = StepCost(NUM_STAGES * STEP_SECONDS, NUM_STAGES * TOKEN_SECONDS)

    def rate(speculation: Speculation | None) -> float:
        pipeline = ReplayingPipeline(
            NUM_STAGES, STEP_SECONDS, TOKEN_SECONDS, speculation, 0.001, 16, 512, recorded=ANSWERS[name]
        )
        return pipeline.rate(num_requests)

    return rate(Speculation(15, min_match, cost)) / rate(None)


@pytest.mark.parametrize(
    ("name", "one", "four", "sixteen"),
    [
        ("repeat", 4.5, 2.5, 1.15),
        ("spelling", 5.8, 4.0, 1.6),
        ("rename", 1.1, 0.94, 0.98),
        ("summary", 1.45, 0.98, 0.97),
        ("json", 1.35, 0.96, 0.98),
        ("chat", 0.98, 0.98, 0.98),
    ],
)
def test_copies_come_faster_and_nothing_comes_slower(name: str, one: float, four: float, sixteen: float) -> None:
    found = {count: round(gain(name, count), 3) for count in (1, 4, 16)}
    assert [found[1] >= one, found[4] >= four, found[16] >= sixteen] == [True] * 3, found


@pytest.mark.parametrize("name", ["spelling", "summary", "json"])
def test_a_match_of_one_token_is_worth_a_draft_where_nobody_waits(name: str) -> None:
    assert gain(name, 1, min_match=1) > gain(name, 1, min_match=2)


def fed(drafts: RequestDrafts, text: tuple[int, ...], begin: int) -> None:
    """Its tokens come one by one, in rows without drafts."""
    for known in range(begin, len(text) + 1):
        drafts.note_plain_token(known, parts_of(text))


def parts_of(text: tuple[int, ...]) -> Tokens:
    return lambda start, stop: text[start:stop]


def test_what_follows_one_token_is_judged_apart_from_what_follows_several() -> None:
    """After 1, 2 and 3 comes something else each time; 5 to 13 come as ever."""
    text: tuple[int, ...] = ()
    for number in range(20):
        text += (100 + number, 1, 200 + number, 2, 300 + number, 3, 400 + number, *range(5, 14))
    proposed = {}
    for end in ((500, 1), (500, 5, 6)):
        drafts = Speculation(15, 1, StepCost(0.026, 0.0014)).of_request()
        fed(drafts, text, 2)
        whole = (*text, *end)
        proposed[end] = drafts.propose(len(whole), parts_of(whole), num_rows=2)
    assert proposed[500, 1] == ()
    assert proposed[500, 5, 6][:3] == (7, 8, 9)
