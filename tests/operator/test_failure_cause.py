"""Which container's end counts as a group's cause."""

from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest

from stageline_api.failures import FailureClass, TerminationMessage
from stageline_operator.planner.group.cause import Failure, Settling, classify, find_cause
from stageline_operator.planner.observed.container_end import ContainerEnd

START = datetime(2026, 1, 1, tzinfo=UTC)
LATER = START + timedelta(seconds=60)


def end(
    stage: int, exit_code: int | None, words: str = "", second: float = 0, container: str = "stage", reason: str = ""
) -> ContainerEnd:
    signal = exit_code - 128 if exit_code is not None and exit_code > 128 else 0
    return ContainerEnd(stage, container, exit_code, signal, reason, words, START + timedelta(seconds=second))


def words(failure_class: FailureClass, peer: int | None = None) -> str:
    return TerminationMessage(failure_class=failure_class, peer=peer, detail="so it was").model_dump_json()


LOST_0, LOST_1, LOST_2 = (words(FailureClass.PEER_LOST, peer) for peer in range(3))
ENGINE_LOST = words(FailureClass.ENGINE_LOST)


@pytest.mark.parametrize(
    ("ends", "stage", "container", "failure_class"),
    [
        pytest.param([end(1, 137)], 1, "stage", "Killed", id="killed-alone"),
        pytest.param([end(0, 71, LOST_1, 0), end(1, 137, "", 5)], 1, "stage", "Killed", id="later-seen-cause"),
        pytest.param(
            [end(0, 71, LOST_1, 0), end(1, 71, LOST_2, 1), end(2, 66, words(FailureClass.OUT_OF_MEMORY), 2)],
            2,
            "stage",
            "OutOfMemory",
            id="chain-of-peers",
        ),
        pytest.param(
            [end(1, 73, ENGINE_LOST, 0), end(0, 137, "", 1, "engine")], 0, "engine", "Killed", id="engine-killed"
        ),
        pytest.param([end(0, 137, "", 2), end(1, 137, "", 1)], 1, "stage", "Killed", id="earliest-of-two"),
        pytest.param([end(0, 0, "", 0), end(1, 72, "", 1)], 1, "stage", "StepTimeout", id="drained-explains-nothing"),
        pytest.param(
            [end(0, 71, LOST_1, 0), end(1, 71, LOST_0, 1)], 0, "stage", "PeerLost", id="each-blames-the-other"
        ),
        pytest.param(
            [end(0, 71, LOST_2, 0), end(1, 1, "boom", 1)], 1, "stage", "Internal", id="blamed-stage-shows-nothing"
        ),
        pytest.param([end(0, 0, "", 0)], 0, "stage", "Internal", id="ended-well-but-unasked"),
        pytest.param(
            [end(1, 0, "", 0), end(0, 0, words(FailureClass.EVICTED), 1, "engine")],
            0,
            "engine",
            "Evicted",
            id="drained",
        ),
        pytest.param(
            [end(0, 0, words(FailureClass.EVICTED), 0, "engine"), end(1, 137, "", 1)],
            1,
            "stage",
            "Killed",
            id="killed-while-it-drained",
        ),
        pytest.param([end(0, 137, "", 0, reason="OOMKilled")], 0, "stage", "OOMKilled", id="oom-killed"),
    ],
)
def test_the_cause_is_the_failure_no_other_explains(
    ends: list[ContainerEnd], stage: int, container: str, failure_class: str
) -> None:
    cause = find_cause(ends, LATER)
    assert isinstance(cause, Failure)
    assert (cause.end.stage, cause.end.container, cause.failure_class) == (stage, container, failure_class)
    assert find_cause(list(reversed(ends)), LATER) == cause, "the order in which pods are listed must not matter"


def test_nothing_failed_has_no_cause() -> None:
    assert find_cause([], LATER) is None


@pytest.mark.parametrize(
    ("given", "failure_class", "detail"),
    [
        pytest.param(
            end(0, 0),
            "Internal",
            "exited with status 0 and reported no drain",
            id="well-but-unasked",
        ),
        pytest.param(end(0, 0, words(FailureClass.EVICTED)), "Evicted", "so it was", id="told-to-drain"),
        pytest.param(end(0, 65), "ModelLoad", "exited with status 65 and no termination message", id="code-only"),
        pytest.param(end(0, 3, "last line"), "Internal", "last line", id="plain-text"),
        pytest.param(end(0, 3, "log line\n  the end \n"), "Internal", "the end", id="end-of-a-log"),
        pytest.param(end(0, 137, "a\nb"), "Killed", "killed by SIGKILL; last output: b", id="killed-with-a-log"),
        pytest.param(end(0, 143), "Killed", "killed by SIGTERM", id="signal"),
        pytest.param(end(0, 192), "Killed", "killed by SIGRTMAX", id="realtime-signal"),
        pytest.param(end(0, 255), "Killed", "killed by signal 127", id="no-such-signal"),
        pytest.param(end(0, None, "no such", reason="ErrImagePull"), "ImagePull", "no such", id="image"),
        pytest.param(end(0, None, "disk", reason="Evicted"), "Evicted", "disk", id="evicted"),
        pytest.param(end(0, 1, '{"failure_class": "NoSuch"}'), "Internal", '{"failure_class": "NoSuch"}', id="alien"),
    ],
)
def test_an_end_is_classified_by_its_words_then_its_code(given: ContainerEnd, failure_class: str, detail: str) -> None:
    failure = classify(given)
    assert (failure.failure_class, failure.detail) == (failure_class, detail)


def test_the_rank_that_failed_first_is_known_where_its_stage_names_it() -> None:
    told = TerminationMessage(failure_class=FailureClass.OUT_OF_MEMORY, stage=2, rank=1, detail="no room")
    found = find_cause([end(1, 71, LOST_2), end(2, 66, told.model_dump_json(), 1)], LATER)
    assert isinstance(found, Failure)
    assert (found.end.stage, found.rank, found.detail) == (2, 1, "no room")
    older = '{"failure_class": "OutOfMemory", "stage": 2, "detail": "no room"}'
    assert classify(end(2, 66, older)).rank is None, "a message of a runtime that knew no ranks"
    assert classify(end(2, 137, told.model_dump_json(), reason="OOMKilled")).rank is None, "the kernel names none"


def test_a_stage_that_hangs_is_told_by_the_rank_that_waited_for_it() -> None:
    told = TerminationMessage(failure_class=FailureClass.STEP_TIMEOUT, stage=1, rank=1, peer=0, detail="recv")
    found = find_cause([end(1, 72, told.model_dump_json())], LATER)
    assert isinstance(found, Failure)
    assert (found.end.stage, found.rank) == (0, None)
    assert found.detail == "it hangs: stage 1, rank 1 timed out waiting for it: recv"


def waited_for(stage: int, peer: int | None, second: float) -> ContainerEnd:
    return end(stage, 72, words(FailureClass.STEP_TIMEOUT, peer), second)


@pytest.mark.parametrize("hung", range(4))
@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_the_stage_that_hangs_is_the_cause_in_whatever_order_the_others_give_up(hung: int, order: list[int]) -> None:
    """Under full load every other stage waits: for its hidden tensors, and stage 0 for the feedback of the last."""
    others = [stage for stage in range(4) if stage != hung]
    ends = [waited_for(stage, (stage - 1) % 4, second) for stage, second in zip(others, order, strict=True)]
    found = find_cause(ends, LATER)
    assert isinstance(found, Failure)
    assert (found.end.stage, found.failure_class) == (hung, "StepTimeout")
    assert f"it hangs: stage {(hung + 1) % 4} timed out waiting for it" in found.detail


@pytest.mark.parametrize("hung", range(4))
def test_at_low_load_one_stage_waits_and_the_others_lose_it(hung: int) -> None:
    witness = (hung + 1) % 4
    lost = words(FailureClass.PEER_LOST, witness)
    ends = [waited_for(witness, hung, 5)] + [end(s, 71, lost, 6) for s in range(4) if s not in (hung, witness)]
    found = find_cause(ends, LATER)
    assert isinstance(found, Failure)
    assert (found.end.stage, found.failure_class) == (hung, "StepTimeout")


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize(
    ("hung", "waits", "lost"),
    [(0, {1: 0, 3: 2}, {2: 1}), (1, {0: 3, 2: 1}, {3: 2}), (2, {0: 3, 3: 2}, {1: 0}), (3, {0: 3, 2: 3}, {1: 0})],
)
def test_a_wait_for_one_that_ended_itself_does_not_hide_the_one_that_hangs(
    hung: int, waits: dict[int, int], lost: dict[int, int], order: list[int]
) -> None:
    """As four real stages ended with one stopped: two waited too long, and one lost a neighbour that had."""
    ends = [waited_for(stage, peer, 5) for stage, peer in waits.items()]
    ends += [end(stage, 71, words(FailureClass.PEER_LOST, peer), 5) for stage, peer in lost.items()]
    found = find_cause([ends[at] for at in order], LATER)
    assert isinstance(found, Failure)
    assert (found.end.stage, found.failure_class) == (hung, "StepTimeout"), found


@pytest.mark.parametrize("hung", range(4))
def test_a_stage_that_says_itself_that_it_hangs_is_believed(hung: int) -> None:
    ends = [waited_for(stage, None if stage == hung else (stage - 1) % 4, 9 - stage) for stage in range(4)]
    found = find_cause(ends, LATER)
    assert isinstance(found, Failure)
    assert (found.end.stage, found.detail) == (hung, "so it was")


def test_a_lost_node_explains_why_others_waited_for_its_stage() -> None:
    lost = ContainerEnd(1, "", None, 0, "NodeLost", "node b is lost", START + timedelta(seconds=9))
    found = find_cause([waited_for(2, 1, 0), waited_for(3, 2, 1), lost], LATER)
    assert isinstance(found, Failure)
    assert (found.end.stage, found.failure_class) == (1, "NodeLost")


def test_the_end_of_the_stage_that_is_waited_for_may_be_seen_later() -> None:
    found = find_cause([waited_for(2, 1, 0)], START + timedelta(seconds=1))
    assert isinstance(found, Settling)
    killed = end(1, 137, "", 2)
    found = find_cause([waited_for(2, 1, 0), killed], START + timedelta(seconds=2))
    assert isinstance(found, Failure)
    assert (found.end.stage, found.failure_class) == (1, "Killed")


def test_stages_that_wait_for_each_other_in_a_circle_leave_the_first_as_the_cause() -> None:
    found = find_cause([waited_for(stage, (stage - 1) % 4, stage) for stage in range(4)], LATER)
    assert isinstance(found, Failure)
    assert found.end.stage == 0
