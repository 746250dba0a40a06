"""When a request is taken for what ends its groups: at the same place again and again, and never before."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_gateway.engine_client.run_events import EngineLostError, LossKind
from stageline_gateway.relay.blame import BLAMELESS, MOST_HANGS, MOST_WITHOUT_A_TOKEN, Blame

MOST_LOSSES = 8


class Loss(NamedTuple):
    """One loss: how, behind how many tokens, and whether the request only waited."""

    kind: LossKind
    tokens: int
    had_no_part: bool = False


def reason(*losses: Loss) -> str | None:
    """Why a request with these losses is given up behind the last of them."""
    blame = Blame()
    for kind, tokens, had_no_part in losses:
        blame.lost(EngineLostError(kind, "lost", had_no_part=had_no_part), tokens)
    return blame.reason(MOST_LOSSES)


def died(tokens: int, had_no_part: bool = False) -> Loss:
    """A group ended for no reason that is known."""
    return Loss(LossKind.CONNECTION_LOST, tokens, had_no_part)


HUNG, LEFT, UNREACHABLE = Loss(LossKind.HUNG, 0), Loss(LossKind.LEFT, 0), Loss(LossKind.UNREACHABLE, 0)
REFUSED = Loss(LossKind.PROTOCOL, 2, had_no_part=True)
"""With the gateway's key."""
IN_A_ROW, NINE = "Engines were lost 3 times in a row", "Engines were lost 9 times with"
GIVEN_UP: dict[str, tuple[list[Loss], str]] = {
    "three before the first token": ([died(0)] * 3, IN_A_ROW),
    "three behind the same token": ([died(0), died(5), died(5), died(5)], IN_A_ROW),
    "moved on purpose between": ([died(0), LEFT, died(0), UNREACHABLE, died(0)], IN_A_ROW),
    "waited between": ([died(2), died(2, had_no_part=True), died(2), REFUSED, died(2)], IN_A_ROW),
    "two hangs": ([HUNG, HUNG], "Groups hung 2 times"),
    "two hangs with tokens between": ([HUNG, Loss(LossKind.HUNG, 7)], "Groups hung 2 times"),
    "nine with a token each": ([died(each) for each in range(9)], NINE),
    "nine while it waited": ([died(0, had_no_part=True)] * 9, NINE),
}
GOES_ON: dict[str, list[Loss]] = {
    "two before the first token": [died(0)] * 2,
    "a token since": [died(0), died(0), died(1), died(1)],
    "a hang and two others": [HUNG, died(0)],
    "eight while it waited": [died(0, had_no_part=True)] * 8,
    "refused eight times": [REFUSED] * 8,
    "moved on purpose": [LEFT] * 20,
    "never reached": [UNREACHABLE] * 20,
}


@pytest.mark.parametrize(("losses", "why"), GIVEN_UP.values(), ids=GIVEN_UP.keys())
def test_it_is_given_up_at_the_last_of_these_losses_and_not_before(losses: list[Loss], why: str) -> None:
    told = reason(*losses)
    assert told is not None
    assert told.startswith(why), told
    assert told.endswith("so it is sent to no other."), told
    assert reason(*losses[:-1]) is None


@pytest.mark.parametrize("losses", GOES_ON.values(), ids=GOES_ON.keys())
def test_it_goes_on(losses: list[Loss]) -> None:
    assert reason(*losses) is None


@given(st.lists(st.builds(Loss, st.sampled_from(LossKind), st.integers(0, 4), st.booleans()), max_size=20))
def test_tokens_that_never_go_back_say_by_their_count_alone_whether_it_is_given_up(losses: list[Loss]) -> None:
    losses.sort(key=lambda loss: loss.tokens)
    real = [loss for loss in losses if loss.kind not in BLAMELESS]
    told = reason(*losses)
    hangs = sum(loss.kind is LossKind.HUNG for loss in real)
    blamed = [loss.tokens for loss in real if not loss.had_no_part]
    in_a_row = blamed.count(blamed[-1]) if blamed else 0
    is_guilty = hangs > MOST_HANGS or in_a_row > MOST_WITHOUT_A_TOKEN or len(real) > MOST_LOSSES
    assert (told is not None) == is_guilty, (told, real)
