"""`make test-cluster` skips for one reason only: Go is missing. With Go there, whatever goes wrong is a failure."""

import shutil
import subprocess
from pathlib import Path

import pytest

from processes.repository_files import ROOT

PYTHON_THAT_TELLS = '#!/bin/sh\necho "python $*"\nexit "${PYTHON_STATUS:-0}"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script with a stand-in for the environment's Python, and a PATH of few programs."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test-cluster", tmp_path / "scripts")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON_THAT_TELLS)
    python.chmod(0o755)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "dirname", "env"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    return tmp_path


def run_script(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(checkout / "scripts" / "test-cluster"), "-x"],
        env={"PATH": str(checkout / "programs"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def add_go(checkout: Path) -> None:
    go = checkout / "programs" / "go"
    go.write_text("#!/bin/sh\n")
    go.chmod(0o755)


def test_without_go_it_says_so_and_runs_nothing(checkout: Path) -> None:
    done = run_script(checkout)
    assert done.returncode == 0, done.stderr
    assert "SKIPPED, because Go is not installed" in done.stdout
    assert "python" not in done.stdout


def test_with_go_it_builds_and_then_tests(checkout: Path) -> None:
    add_go(checkout)
    done = run_script(checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "python -m cluster.control_plane_binary",
        "python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/cluster -x",
    ]


def test_a_build_that_fails_with_go_there_is_a_failure(checkout: Path) -> None:
    add_go(checkout)
    done = run_script(checkout, PYTHON_STATUS="1")
    assert done.returncode == 1
    assert "SKIPPED" not in done.stdout
    assert "pytest" not in done.stdout


def test_a_persons_own_cluster_needs_no_go_but_a_kubeconfig(checkout: Path) -> None:
    refused = run_script(checkout, STAGELINE_E2E_CLUSTER="1")
    assert refused.returncode == 2
    assert "needs KUBECONFIG" in refused.stderr
    done = run_script(checkout, STAGELINE_E2E_CLUSTER="1", KUBECONFIG="config")
    assert done.returncode == 0, done.stderr
    assert "python -m pytest -n 0 " in done.stdout, "its operators would see each other's models"
