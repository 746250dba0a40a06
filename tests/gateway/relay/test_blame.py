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
    was_waiting: bool = False


def reason(*losses: Loss) -> str | None:
    """Why a request with these losses is given up behind the last of them."""
    blame = Blame()
    for kind, tokens, was_waiting in losses:
        blame.lost(EngineLostError(kind, "lost", was_waiting=was_waiting), tokens)
    return blame.reason(MOST_LOSSES)


def died(tokens: int, was_waiting: bool = False) -> Loss:
    """A group ended for no reason that is known."""
    return Loss(LossKind.CONNECTION_LOST, tokens, was_waiting)


HUNG, LEFT, UNREACHABLE = Loss(LossKind.HUNG, 0), Loss(LossKind.LEFT, 0), Loss(LossKind.UNREACHABLE, 0)
GIVEN_UP: dict[str, tuple[list[Loss], str]] = {
    "three before the first token": ([died(0)] * 3, "3 groups in a row"),
    "three behind the same token": ([died(0), died(5), died(5), died(5)], "3 groups in a row"),
    "moved on purpose between": ([died(0), LEFT, died(0), UNREACHABLE, died(0)], "3 groups in a row"),
    "waited between": ([died(2), died(2, was_waiting=True), died(2), died(2)], "3 groups in a row"),
    "two hangs": ([HUNG, HUNG], "2 groups hung"),
    "two hangs with tokens between": ([HUNG, Loss(LossKind.HUNG, 7)], "2 groups hung"),
    "nine with a token each": ([died(each) for each in range(9)], "9 groups were lost"),
    "nine while it waited": ([died(0, was_waiting=True)] * 9, "9 groups were lost"),
}
GOES_ON: dict[str, list[Loss]] = {
    "two before the first token": [died(0)] * 2,
    "a token since": [died(0), died(0), died(1), died(1)],
    "a hang and two others": [HUNG, died(0)],
    "eight while it waited": [died(0, was_waiting=True)] * 8,
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
def test_no_request_goes_round_for_ever_and_none_is_given_up_for_few_losses(losses: list[Loss]) -> None:
    losses.sort(key=lambda loss: loss.tokens)
    real = [loss for loss in losses if loss.kind not in BLAMELESS]
    told = reason(*losses)
    if len(real) > MOST_LOSSES:
        assert told is not None, real
    if len(real) <= min(MOST_HANGS, MOST_WITHOUT_A_TOKEN):
        assert told is None, (told, real)
