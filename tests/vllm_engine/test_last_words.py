"""An exception that leaves a worker's call: what of it is written down, and that it alone ends the worker."""

from pathlib import Path

import pytest

from stageline_vllm.plugin.last_words import FAILED_STATUS, LastWords
from stageline_vllm.worker_clock import WorkerClock
from stageline_vllm.worker_state import WorkerPhase, WorkerStateReader, WorkerStateWriter, worker_state_path


class Worker:
    """A worker whose end is noted."""

    def __init__(self, directory: Path) -> None:
        path = worker_state_path(directory, 0)
        clock = WorkerClock(WorkerStateWriter(path), stage=0)
        clock.enter_phase(WorkerPhase.WARMING)
        self.ended: list[int] = []
        self.last_words = LastWords(clock, self.ended.append)
        self._reader = WorkerStateReader(path)

    def written(self) -> tuple[str, WorkerPhase]:
        state = self._reader.read()
        assert state is not None
        return state.life.message, state.life.phase


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.12]:41433"), "RuntimeError: Connection closed by peer [127."),
        (AssertionError(), "AssertionError: in fail (test_last_words.py:"),
    ],
)
def test_an_exception_is_written_down_logged_and_ends_the_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    worker = Worker(tmp_path)
    with pytest.raises(type(error)), worker.last_words.of_call():
        fail(error)
    message, phase = worker.written()
    assert message.startswith(words)
    assert phase is WorkerPhase.WARMING, "how far it was says what failed"
    assert worker.ended == [FAILED_STATUS]
    assert "in fail" in capfd.readouterr().err


def test_being_told_to_end_is_no_failure(tmp_path: Path) -> None:
    """vLLM's workers raise SystemExit in their handler of SIGTERM, wherever they are."""
    worker = Worker(tmp_path)
    with pytest.raises(SystemExit), worker.last_words.of_call():
        raise SystemExit
    assert (worker.ended, worker.written()[0]) == ([], "")


def test_a_log_that_cannot_be_written_to_keeps_no_worker_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path)

    def refuse() -> None:
        raise BrokenPipeError

    monkeypatch.setattr("traceback.print_exc", refuse)
    with pytest.raises(BrokenPipeError), worker.last_words.of_call():
        raise ValueError("no heads")
    assert (worker.ended, worker.written()[0]) == ([FAILED_STATUS], "ValueError: no heads")
