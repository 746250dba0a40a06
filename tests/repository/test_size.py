"""`scripts/size` counts statements without docstrings, finds modules with one importer, and compares revisions."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from processes.repository_files import ROOT

SHARED = '''"""Its idea."""


def double(value: int) -> int:
    """Twice."""
    # Why.
    return (
        2 * value
    )
'''
USER = "from stageline_runtime.shared import double\n\nprint(double(1))\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one package with one commit."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "size", tmp_path / "scripts")
    package = tmp_path / "runtime" / "stageline_runtime"
    package.mkdir(parents=True)
    (package / "shared.py").write_text(SHARED, encoding="utf-8")
    (package / "first.py").write_text(USER, encoding="utf-8")
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "first"]):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    return tmp_path


def size(checkout: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(checkout / "scripts" / "size"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def runtime_line(checkout: Path, *words: str) -> str:
    done = size(checkout, *words)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("runtime/stageline_runtime"))
    return " ".join(line.split()[1:])


def test_docstrings_comments_and_line_breaks_are_no_statements(checkout: Path) -> None:
    # Statements: def, return, import, print; one module of two has one importer; the function has six lines.
    assert runtime_line(checkout) == "4 2 1 6"


def test_a_revision_gives_the_change_and_new_files_count(checkout: Path) -> None:
    package = checkout / "runtime" / "stageline_runtime"
    (package / "second.py").write_text(USER, encoding="utf-8")
    assert runtime_line(checkout, "HEAD") == "6 (+2) 3 (+1) 0 (-1) 6"
    (package / "first.py").unlink()
    (package / "second.py").unlink()
    assert runtime_line(checkout, "HEAD") == "2 (-2) 1 (-1) 0 (-1) 6"


def test_an_unknown_revision_is_refused_in_a_sentence(checkout: Path) -> None:
    done = size(checkout, "no-such-revision")
    assert done.returncode != 0
    assert "no-such-revision" in done.stderr
    assert "Traceback" not in done.stderr
