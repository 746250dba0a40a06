"""What a request asks of a draft model, and what it makes of what comes."""

import pytest

from stageline_runtime.speculation.draft_length import FIRST_LENGTH
from stageline_runtime.speculation.model_drafts import MOST_PROBE_TOKENS, ModelDrafts
from stageline_runtime.speculation.settings import DraftSettings
from stageline_runtime.speculation.step_cost import FREE, StepCost

SAID = (1, 2, 3, 4, 5, 6, 7, 8)


def tokens(start: int, stop: int) -> tuple[int, ...]:
    return SAID[start:stop]


def drafts(cost: StepCost = FREE, *, step_seconds: float = 0.0, context: int = 100) -> ModelDrafts:
    return ModelDrafts(DraftSettings(15, 1, cost, draft_step_seconds=step_seconds, draft_context_tokens=context))


def test_drafts_follow_what_was_sampled() -> None:
    request = drafts()
    assert request.propose(3, tokens, 1) == ()
    request.take_drafted(3, (4, 5, 9))
    assert request.propose(3, tokens, 1) == (4, 5, 9)
    assert request.continuation(4, tokens, 2) == (5, 9), "the next token came as it was drafted"
    assert request.continuation(6, tokens, 2) == (), "this one did not"
    assert request.continuation(2, tokens, 2) == (), "a request that begins anew knows less"


def test_it_asks_for_more_while_all_hold_and_for_none_after_misses() -> None:
    request = drafts()
    asked = [request.steps_to_draft(5, 1, 100, 1)]
    for _ in range(2):
        request.note_row(asked[-1], asked[-1])
        asked.append(request.steps_to_draft(5, 1, 100, 1))
    assert asked == [FIRST_LENGTH, 7, 15]
    for _ in range(24):
        request.note_row(15, 0)
    assert request.steps_to_draft(5, 1, 100, 1) == 0
    for _ in range(MOST_PROBE_TOKENS):
        request.note_plain_token(5, tokens)
    assert request.steps_to_draft(5, 1, 100, 1) == 1, "it may have come to easier ground"


def test_a_draft_model_of_no_use_is_tried_ever_more_seldom() -> None:
    """A trial costs a step of the draft model, and a row."""
    request = drafts()
    request.note_row(3, 0)
    while request.steps_to_draft(5, 1, 100, 1):
        request.note_row(1, 0)
    waits: list[int] = []
    for _ in range(4):
        waits.append(0)
        while not request.steps_to_draft(5, 1, 100, 1):
            request.note_plain_token(5, tokens)
            waits[-1] += 1
        request.note_row(1, 0)
    assert waits[-1] == MOST_PROBE_TOKENS
    assert waits == sorted(waits), waits
    request.note_row(1, 1)
    assert request.steps_to_draft(5, 1, 100, 1) > 1, "one that holds is followed"


@pytest.mark.parametrize(("most", "context", "steps"), [(2, 100, 2), (0, 100, 0), (9, 7, 2), (9, 5, 0), (9, 4, 0)])
def test_it_asks_for_no_more_than_the_request_and_the_draft_model_have_room_for(
    most: int, context: int, steps: int
) -> None:
    assert drafts(context=context).steps_to_draft(5, 1, most, 1) == steps


@pytest.mark.parametrize(
    ("num_rows", "stages", "draft_ms", "steps"),
    [(1, 1, 1.0, 3), (1, 4, 1.0, 1), (1, 1, 20.0, 0), (4, 1, 1.0, 1), (4, 4, 3.0, 0)],
)
def test_a_draft_must_be_worth_the_time_of_all_that_wait_for_it(
    num_rows: int, stages: int, draft_ms: float, steps: int
) -> None:
    """Steps of 12 ms and 1 ms a token, at an acceptance of 0.7."""
    request = drafts(StepCost(0.012, 0.001), step_seconds=draft_ms / 1000)
    assert request.steps_to_draft(5, num_rows, 100, stages) == steps


def test_a_draft_steps_time_is_smoothed_and_none_changes_nothing() -> None:
    settings = DraftSettings(15, 1, FREE)
    for seconds in (0.0, 0.010, 0.0, 0.020):
        settings.note_draft_step(seconds)
    assert settings.draft_step_seconds == pytest.approx(0.011)
