"""The commands of docs/quickstart-local.md, as they are on the page, in its order.

What is added to them keeps a run apart from others on this machine: ports, the state directory and the model cache.
"""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from processes.free_ports import free_port
from processes.page_commands import Place, commands_at
from processes.repository_files import ROOT
from processes.serving_command import READY_SECONDS, run_stageline

pytestmark = pytest.mark.timeout(900)
PAGE = "docs/quickstart-local.md"
COMMANDS = commands_at(Place.LOCAL, PAGE)
MONITORED = [command for command in COMMANDS if "--monitor" in command]


@dataclass(frozen=True)
class Apart:
    """Options that keep this run apart from others."""

    state_dir: Path
    cache: Path
    port: int

    def arguments(self, command: str) -> list[str]:
        """The command's words after `stageline`, with the options that its subcommand has."""
        name, *rest = shlex.split(command)[1:]
        added = {
            "up": ["--port", str(self.port), "--state-dir", str(self.state_dir), "--cache", str(self.cache)],
            "status": ["--state-dir", str(self.state_dir)],
            "down": ["--state-dir", str(self.state_dir)],
        }
        return [name, *rest, *added.get(name, [])]


@pytest.fixture(scope="module")
def apart(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Apart:
    return Apart(tmp_path_factory.mktemp("quickstart"), smollm2_dir.parent, free_port())


def test_the_page_shows_each_way_to_start() -> None:
    shown = [command.split()[1] for command in COMMANDS]
    assert shown == ["validate", "plan", "up", "up", "status", "down", "up"], COMMANDS
    assert len(MONITORED) == 1


def test_the_commands_that_end_succeed_in_their_order(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    outputs = {}
    try:
        for command in COMMANDS:
            if command in MONITORED:
                continue
            done = run_stageline(*apart.arguments(command))
            outputs[command.removeprefix(".venv/bin/stageline ")] = done.stdout + done.stderr
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    finally:
        run_stageline("down", "--state-dir", str(apart.state_dir))
    said = {words.split()[0] + " " + words.split()[-1]: text for words, text in outputs.items()}
    assert "smollm2 ok" in said["validate examples/smollm2.yaml"]
    assert "predicted" in said["plan examples/smollm2.yaml"]
    assert "Paris" in next(text for words, text in outputs.items() if "--once" in words)
    assert "stageline down smollm2" in said["up --detach"]
    assert "Ready" in said["status smollm2"], said["status smollm2"]
    assert "ended" in said["down smollm2"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus (scripts/install-prometheus)")
@pytest.mark.parametrize("command", MONITORED)
def test_the_monitored_start_says_where_its_boards_are(apart: Apart, command: str, tmp_path: Path) -> None:
    boards = free_port()
    arguments = [*apart.arguments(command), "--monitor-port", str(boards)]
    log = tmp_path / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stageline_cli.main", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not re.search(rf"http://127\.0\.0\.1:{boards}\b", log.read_text(errors="replace")):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=30)
    assert process.returncode == 0, log.read_text(errors="replace")
