"""What a killed supervisor leaves behind goes with the next start, and nothing else does."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stageline_vllm.supervisor.scratch import LOCK_NAME, PREFIX, Scratch, remove_abandoned, short_temporary_directory

HOLD = """
import sys
from pathlib import Path
from stageline_vllm.supervisor.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.path / "rpc.sock").touch()
print(scratch.path, flush=True)
sys.stdin.read()
"""


def held_by_a_process(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process with a directory of its own that lives until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_what_a_killed_supervisor_left_goes_with_the_next_start(tmp_path: Path) -> None:
    living, in_use = held_by_a_process(tmp_path)
    killed, left = held_by_a_process(tmp_path)
    try:
        kill(killed)
        assert (left / "rpc.sock").exists(), "a killed process removes nothing"
        scratch = Scratch(tmp_path)
        assert not left.exists()
        assert (in_use / "rpc.sock").exists(), "its owner lives"
        assert remove_abandoned(tmp_path) == [], "nor is one's own directory abandoned"
        scratch.remove()
        scratch.remove()
        assert sorted(tmp_path.iterdir()) == [in_use]
    finally:
        kill(living)


def test_what_is_not_certainly_a_dead_supervisors_stays(tmp_path: Path) -> None:
    """Another program's directory, one whose lock another machine holds, one that is being made, a link, a file."""
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    foreign, other_kernel, in_making, linked, file = (
        tmp_path / f"{PREFIX}{name}" for name in ("foreign", "kernel", "making", "linked", "file")
    )
    for directory in (foreign, other_kernel, in_making):
        directory.mkdir()
    (foreign / "data").touch()
    (other_kernel / LOCK_NAME).write_text("another boot")
    (in_making / f"{LOCK_NAME}.new").touch()
    abandoned = Scratch(kept)
    (kept / LOCK_NAME).write_bytes((abandoned.path / LOCK_NAME).read_bytes())
    linked.symlink_to(kept, target_is_directory=True)
    file.touch()
    before = sorted(tmp_path.rglob("*"))
    assert remove_abandoned(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before
    abandoned.remove()


def test_the_owner_holds_the_lock_and_a_missing_parent_holds_nothing(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    with (scratch.path / LOCK_NAME).open("r+b") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    scratch.remove()
    assert remove_abandoned(tmp_path / "absent") == []


def test_paths_of_sockets_stay_short() -> None:
    assert short_temporary_directory({"TMPDIR": "/scratch"}) == Path("/scratch")
    assert short_temporary_directory({"TMPDIR": "/" + "x" * 60}) == Path("/tmp")
    assert short_temporary_directory({}) == Path("/tmp")
