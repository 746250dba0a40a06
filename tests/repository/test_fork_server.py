"""Tests start stages as forks, so a fork has to begin, be signalled and end like any process."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes.fork_server import ForkedProcess, ForkServer, can_fork


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    started = ForkServer()
    yield started
    started.close()


def start(server: ForkServer, directory: Path, program: str, *arguments: str, **variables: str) -> ForkedProcess:
    """Fork a process that runs `program`, a script; its output is in `output`."""
    script = directory / "program.py"
    script.write_text(program)
    with (directory / "output").open("wb") as output:
        return server.start([str(script), *arguments], os.environ | variables, output.fileno())


def test_a_fork_has_the_arguments_variables_and_output_it_was_given(server: ForkServer, tmp_path: Path) -> None:
    program = "import os, sys\nprint(sys.argv[1:], os.environ['GIVEN'], 'ONLY_HERE' in os.environ, file=sys.stderr)"
    fork = start(server, tmp_path, program, "one", "two", GIVEN="this")
    assert fork.wait(timeout=60) == 0
    assert (tmp_path / "output").read_text() == "['one', 'two'] this False\n"


@pytest.mark.parametrize(
    ("program", "status"),
    [("import sys; sys.exit(71)", 71), ("raise ValueError('what was wrong')", 1), ("pass", 0)],
    ids=["exit status", "exception", "end"],
)
def test_a_fork_ends_with_the_status_of_its_program(
    program: str, status: int, server: ForkServer, tmp_path: Path
) -> None:
    fork = start(server, tmp_path, program)
    assert fork.wait(timeout=60) == status, (tmp_path / "output").read_text()
    assert fork.poll() == fork.returncode == status
    assert ("what was wrong" in (tmp_path / "output").read_text()) == (status == 1)


def test_signals_reach_a_fork_and_its_end_tells_of_them(server: ForkServer, tmp_path: Path) -> None:
    fork = start(server, tmp_path, "import time; time.sleep(600)")
    assert fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(timeout=0.1)
    fork.send_signal(signal.SIGTERM)
    assert fork.wait(timeout=60) == -signal.SIGTERM
    fork.kill()  # does nothing to whoever has its pid by now
    assert fork.returncode == -signal.SIGTERM


def test_a_fork_has_torch_already_and_one_thread(server: ForkServer, tmp_path: Path) -> None:
    program = "import os, sys\nprint('torch' in sys.modules, len(os.listdir('/proc/self/task')), sys.argv[0])"
    fork = start(server, tmp_path, program)
    assert fork.wait(timeout=60) == 0
    assert (tmp_path / "output").read_text() == f"True 1 {tmp_path / 'program.py'}\n"


def test_forks_end_with_whoever_asked_for_them(tmp_path: Path) -> None:
    """Also when that one is killed: the server sees its socket close."""
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from processes.fork_server import ForkServer
from pathlib import Path
script = Path({str(tmp_path)!r}) / "sleeps.py"
script.write_text("import time; time.sleep(600)")
print(ForkServer().start([str(script)], os.environ, 1).pid, flush=True)
os.kill(os.getpid(), 9)
"""
    asked = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False, timeout=120)
    assert asked.returncode == -signal.SIGKILL
    pid = int(asked.stdout)
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([ended], [], [], 60)[0], f"fork {pid} outlived whoever asked for it"
    os.close(ended)


def test_what_a_library_reads_at_its_import_is_not_forked() -> None:
    assert can_fork({"OMP_NUM_THREADS": "1"})
    assert not can_fork({"OMP_NUM_THREADS": "4"})
