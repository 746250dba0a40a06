"""Which container's end counts as a group's cause."""

from datetime import UTC, datetime, timedelta

import pytest

from stageline_api.failures import FailureClass, TerminationMessage
from stageline_operator.planner.group.cause import Failure, classify, find_cause
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
            "ended with exit status 0 and does not say that it was told to",
            id="well-but-unasked",
        ),
        pytest.param(end(0, 0, words(FailureClass.EVICTED)), "Evicted", "so it was", id="told-to-drain"),
        pytest.param(end(0, 65), "ModelLoad", "ended with exit status 65 without a message", id="code-only"),
        pytest.param(end(0, 3, "last line"), "Internal", "last line", id="plain-text"),
        pytest.param(end(0, 3, "log line\n  the end \n"), "Internal", "the end", id="end-of-a-log"),
        pytest.param(end(0, 137, "a\nb"), "Killed", "killed by SIGKILL; last words: b", id="killed-with-a-log"),
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
