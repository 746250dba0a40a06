"""`make test-node` says what it lacks and stops there; it never runs its tests outside namespaces of their own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from processes.repository_files import ROOT

SCRIPT = ROOT / "scripts" / "test-node"


def run_script(folder: Path, user: str, *programs: str) -> subprocess.CompletedProcess[str]:
    """The script as `user`, on a PATH with `programs`, which do nothing, and the few that it always uses."""
    folder.mkdir()
    for name in ("sh", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    for name in ("id", *programs):
        program = folder / name
        program.write_text(f"#!/bin/sh\necho {user}\n")
        program.chmod(0o755)
    environment = {"PATH": str(folder), "HOME": str(folder)}
    return subprocess.run(["sh", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("user", "programs", "reason"),
    [
        ("1000", ("go", "apt-get"), "it takes root"),
        ("0", ("apt-get",), "Go is not installed"),
        ("0", ("go",), "this is not Debian"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_done(
    tmp_path: Path, user: str, programs: tuple[str, ...], reason: str
) -> None:
    done = run_script(tmp_path / "bin", user, *programs)
    assert done.returncode == 0, done.stderr
    assert "make test-node: SKIPPED, because" in done.stdout
    assert reason in done.stdout
    assert not done.stderr


def test_the_tests_skip_outside_the_namespaces_that_the_script_makes() -> None:
    """Else they would change this machine's own network."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "tests/node"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "passed" not in done.stdout.splitlines()[-1], done.stdout
    assert "make test-node runs it in one of its own" in done.stdout
