"""A stage's last words from its ranks' ends, and its status from their accounts: tables of exact states."""

import pytest

from stageline_api.failures import FailureClass, TerminationMessage
from stageline_api.health import Phase, StageStatus
from stageline_runtime.stage.ranks.account import RankAccount, phase_of_ranks, status_of_ranks
from stageline_runtime.stage.ranks.ends import RankEnd, last_words_of

STAGE = 2


def words(failure_class: FailureClass, *, rank: int | None = None, peer: int | None = None) -> TerminationMessage:
    return TerminationMessage(failure_class=failure_class, stage=STAGE, rank=rank, peer=peer, detail="said")


KILLED = RankEnd(1, -9, None)
LOST = RankEnd(0, 71, words(FailureClass.PEER_LOST))
"""It waited for a rank that has ended."""
DRAINED = RankEnd(0, 0, words(FailureClass.EVICTED))


@pytest.mark.parametrize(
    ("ends", "failure_class", "rank"),
    [
        ([KILLED, LOST], FailureClass.KILLED, 1),
        ([LOST, KILLED], FailureClass.KILLED, 1),
        ([RankEnd(1, -9, None, is_out_of_memory=True), LOST], FailureClass.OUT_OF_MEMORY, 1),
        ([RankEnd(1, 1, None), LOST], FailureClass.INTERNAL, 1),
        ([RankEnd(0, 72, words(FailureClass.STEP_TIMEOUT, rank=1))], FailureClass.STEP_TIMEOUT, 1),
        (
            [
                RankEnd(0, 72, words(FailureClass.STEP_TIMEOUT, rank=1)),
                RankEnd(1, 66, words(FailureClass.OUT_OF_MEMORY)),
            ],
            FailureClass.OUT_OF_MEMORY,
            1,
        ),
        (
            [
                RankEnd(0, 72, words(FailureClass.STEP_TIMEOUT, rank=1)),
                RankEnd(1, 72, words(FailureClass.STEP_TIMEOUT, peer=1)),
            ],
            FailureClass.STEP_TIMEOUT,
            1,
        ),
        ([RankEnd(1, 65, words(FailureClass.MODEL_LOAD)), LOST], FailureClass.MODEL_LOAD, 1),
        ([RankEnd(1, 71, words(FailureClass.PEER_LOST, peer=1)), LOST], FailureClass.PEER_LOST, None),
        ([RankEnd(1, 64, words(FailureClass.BAD_CONFIG))], FailureClass.BAD_CONFIG, None),
        ([RankEnd(0, 70, words(FailureClass.RENDEZVOUS_TIMEOUT, rank=1))], FailureClass.RENDEZVOUS_TIMEOUT, 1),
        ([RankEnd(0, 70, words(FailureClass.RENDEZVOUS_TIMEOUT))], FailureClass.RENDEZVOUS_TIMEOUT, None),
        ([DRAINED, KILLED], FailureClass.KILLED, 1),
        ([RankEnd(1, 0, words(FailureClass.EVICTED)), DRAINED], FailureClass.EVICTED, None),
    ],
)
def test_the_failure_that_no_other_explains_is_told(
    ends: list[RankEnd], failure_class: FailureClass, rank: int | None
) -> None:
    told = last_words_of(STAGE, ends)
    assert told is not None
    assert (told.failure_class, told.stage, told.rank) == (failure_class, STAGE, rank), told
    assert told.detail


def test_a_stage_told_to_end_before_it_began_says_nothing() -> None:
    assert last_words_of(STAGE, [RankEnd(0, 0, None)]) is None


def account(phase: Phase, loaded: int = 5, message: str = "") -> RankAccount:
    status = StageStatus(
        phase=phase, stage=1, stage_count=2, incarnation=3, loaded_bytes=loaded, total_bytes=10, message=message
    )
    return RankAccount(status=status, busy_seconds=1.0, exchange_seconds=0.5)


@pytest.mark.parametrize(
    ("phases", "phase"),
    [
        ([Phase.READY, Phase.READY], Phase.READY),
        ([Phase.READY, Phase.WARMING], Phase.WARMING),
        ([Phase.LOADING, Phase.RENDEZVOUS], Phase.LOADING),
        ([Phase.READY, Phase.DRAINING], Phase.DRAINING),
        ([Phase.DRAINING, Phase.FAILED], Phase.FAILED),
    ],
)
def test_a_stage_is_where_the_last_of_its_ranks_is(phases: list[Phase], phase: Phase) -> None:
    assert phase_of_ranks([account(each) for each in phases]) is phase
    assert phase_of_ranks([account(Phase.READY), None]) is Phase.STARTING, "one that has said nothing yet"


def test_a_status_is_of_all_ranks() -> None:
    nobody = StageStatus(phase=Phase.STARTING, stage=1, stage_count=2, incarnation=3)
    assert status_of_ranks([None, None], nobody) == nobody
    status = status_of_ranks([account(Phase.RENDEZVOUS), account(Phase.LOADING, 4, "file 2")], nobody)
    assert (status.phase, status.loaded_bytes, status.total_bytes) == (Phase.LOADING, 9, 20)
    assert status.message == "rank 1: file 2"
    both = [account(Phase.LOADING, 1, "file 1"), account(Phase.LOADING, 1, "file 1")]
    assert status_of_ranks(both, nobody).message == "file 1"
