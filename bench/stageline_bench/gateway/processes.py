"""Processes of a benchmark: started on given cores, measured for CPU time and memory, always ended."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from stageline_api.errors import UserError

START_SECONDS: Final = 120.0
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@contextmanager
def started(command: Sequence[str], core: int, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process on one core, killed at the end; stderr goes to `log`, stdout is a pipe."""
    with log.open("a") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
        if process.stdout is not None:
            process.stdout.close()


def python_module(name: str, *arguments: str) -> list[str]:
    """The command of a module of this distribution."""
    return [sys.executable, "-m", name, *arguments]


def wait_for(url: str, log: Path) -> None:
    """Wait until `url` answers 200; raises UserError if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=2, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise UserError(f"{url} did not answer within {START_SECONDS:g} s:\n{log.read_text(errors='replace')[-2000:]}")


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of processes."""
    return (
        sum(
            int(field)
            for pid in pids
            for field in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        )
        / _TICKS_PER_SECOND
    )


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
