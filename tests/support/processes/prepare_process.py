"""Runs the real `stageline prepare` as a process and watches its cache from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_SECONDS = 120.0
COMMAND = ("-m", "stageline_cli.main")
STOPPING_COMMAND = (str(Path(__file__).with_name("stops_in_conversion.py")),)


class PrepareProcess:
    """One `stageline prepare`; its standard error goes to a file that can be read while it runs."""

    def __init__(self, log: Path, arguments: list[str], environment: dict[str, str], stops: bool = False) -> None:
        """With `stops` it stops itself in the middle of its conversion."""
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *(STOPPING_COMMAND if stops else COMMAND), "prepare", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )

    @property
    def told(self) -> str:
        """What it has said on standard error."""
        return self.log.read_text()

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.process.send_signal(number)

    def finish(self) -> tuple[int, str]:
        """Wait for the end; gives exit status and standard output."""
        output, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, output

    def end(self) -> None:
        """Make sure that it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def wait_until(condition: Callable[[], bool], describe: Callable[[], str]) -> None:
    """Poll until `condition` holds; fails with `describe()` when it does not in time."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.002)


def partials(cache: Path) -> list[Path]:
    """Directories of unfinished entries."""
    return list(cache.glob(".*.partial-*"))


def entries(cache: Path) -> list[Path]:
    """Published entries."""
    return [path for path in cache.glob("*") if not path.name.startswith(".")]
