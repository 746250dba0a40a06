"""A watchdog and the thread it watches may end a process at once: one whole message is left, and one exit code."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from stageline_api import env
from stageline_api.failures import EXIT_CODE_OF_CLASS, ExitCode, FailureClass, TerminationMessage
from stageline_runtime.termination import RuntimeFailure, write_drained, write_last_words

CLASSES = (FailureClass.STEP_TIMEOUT, FailureClass.PEER_LOST)


def test_threads_that_end_at_once_leave_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(20):
        path = tmp_path / f"{turn}.termination"
        monkeypatch.setenv(env.TERMINATION_PATH, str(path))
        at_once = Barrier(len(CLASSES))

        def end(failure_class: FailureClass, barrier: Barrier = at_once) -> ExitCode:
            # Of different lengths, so that one over the other leaves a rest.
            failure = RuntimeFailure(failure_class, str(failure_class) * 200, peer=1)
            barrier.wait()
            return write_last_words(failure.message(0))

        with ThreadPoolExecutor(len(CLASSES)) as pool:
            codes = set(pool.map(end, CLASSES))
        told = TerminationMessage.model_validate_json(path.read_text())
        assert codes == {EXIT_CODE_OF_CLASS[told.failure_class]}


@pytest.mark.parametrize("drained_first", [True, False])
def test_a_drain_and_a_failure_leave_the_words_and_the_code_of_the_first(
    drained_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "termination"
    monkeypatch.setenv(env.TERMINATION_PATH, str(path))
    failure = RuntimeFailure(FailureClass.STEP_TIMEOUT, "the step took too long").message(0)
    codes = {write_drained(0, "SIGTERM to stage 0")} if drained_first else {write_last_words(failure)}
    codes.add(write_last_words(failure) if drained_first else write_drained(0, "SIGTERM to stage 0"))
    told = TerminationMessage.model_validate_json(path.read_text()).failure_class
    first = (
        (FailureClass.EVICTED, ExitCode.DRAINED) if drained_first else (failure.failure_class, ExitCode.STEP_TIMEOUT)
    )
    assert (told, codes) == (first[0], {first[1]})
