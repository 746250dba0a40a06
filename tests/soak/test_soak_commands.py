"""The parts of a soak that are other programs: what of them is a failure, and that none outlives an interruption."""

import sys
from pathlib import Path

import pytest

from chaos import soak_commands
from processes.serving_command import wait_gone


def test_a_part_that_fails_says_so_and_where_its_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_commands, "FUZZING", ("tests/no_such_file.py",))
    outcome = soak_commands.fuzz(2, 7, tmp_path)
    assert outcome.is_failure
    assert outcome.line == f"fuzz (2 times): FAILED, exit status {outcome.status}; see {tmp_path / 'fuzz.log'}"
    assert "no_such_file.py" in (tmp_path / "fuzz.log").read_text()


def test_without_go_the_operator_s_part_is_left_out_and_the_report_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = soak_commands.operator(500, tmp_path)
    assert not outcome.is_failure
    assert outcome.line == "operator (500 models): left out, " + outcome.left_out
    assert "Go is not installed" in outcome.left_out


def test_an_interruption_ends_the_program_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Interrupting:
        """Standard output of somebody who presses Ctrl-C at the first line."""

        def write(self, text: str) -> None:
            started.append(int(text))
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", Interrupting())
    program = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        soak_commands.run("sleeper", [sys.executable, "-c", program], {}, tmp_path)
    monkeypatch.undo()
    wait_gone(started, timeout_seconds=60)
    assert len(started) == 1
