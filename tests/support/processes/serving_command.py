"""`stageline up` as a person runs it: a real process, its output, its children, its end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from processes.free_ports import free_port
from stageline_api import env
from stageline_api.engine_access import authorization, read_keys

READY_SECONDS = 180.0


def engine_authorization(root: int) -> str:
    """What the engines of a `stageline up` ask callers for, as a process of it was told."""
    for pid in descendants(root):
        if (keys := environment_of(pid).get(env.ENGINE_KEYS)) is not None:
            return authorization(read_keys(keys))
    raise AssertionError(f"no process of {root} has {env.ENGINE_KEYS}")


def environment_of(pid: int) -> dict[str, str]:
    """Variables that a process was started with (Linux); none when it has ended."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


@dataclass(slots=True)
class ServingCommand:
    """A running `stageline up`."""

    process: subprocess.Popen[bytes]
    port: int
    state_dir: Path
    log: Path

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        return f"http://127.0.0.1:{self.port}"

    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_seconds: float = READY_SECONDS, *, after: int = 0) -> None:
        """Until `text` stands in the output behind the first `after` characters."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self.output()[after:]:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout_seconds:g} s:\n{self.output()}"
            time.sleep(0.05)

    def wait_serving(self, timeout_seconds: float = READY_SECONDS) -> None:
        """Until the gateway says that a group is ready."""
        deadline = time.monotonic() + timeout_seconds
        # One client for all: each makes its TLS settings anew, which takes longer than to ask.
        with httpx.Client(timeout=2.0, trust_env=False, verify=False) as client:
            while True:
                assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()}"
                assert time.monotonic() < deadline, f"not serving within {timeout_seconds:g} s:\n{self.output()}"
                try:
                    if client.get(f"{self.url}/readyz").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)

    def stage_pids(self) -> list[int]:
        """Process ids of the stages, in no particular order."""
        return [pid for pid in descendants(self.process.pid) if command_line(pid)[-1:] == ["stage"]]

    def end(self, with_signal: signal.Signals = signal.SIGINT, timeout_seconds: float = 120.0) -> int:
        """Signal it and wait for its end; returns the exit status."""
        self.process.send_signal(with_signal)
        return self.process.wait(timeout=timeout_seconds)


@contextmanager
def serving(model_file: Path, directory: Path, cache: Path, *options: str) -> Iterator[ServingCommand]:
    """Run `stageline up` on a free port; on the way out it is ended, hard if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = directory / "up.log"
    arguments = ["--port", str(port), "--state-dir", str(directory / "state"), "--cache", str(cache), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stageline_cli.main", "up", str(model_file), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    command = ServingCommand(process, port, directory / "state", log)
    try:
        yield command
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


def run_stageline(*arguments: str, timeout_seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run one `stageline` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "stageline_cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def descendants(pid: int) -> list[int]:
    """Process ids of all living descendants of a process (Linux)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def parent_of(pid: int) -> int:
    """Process id of the parent of a living process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_line(pid: int) -> list[str]:
    """Arguments of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Whether a process still runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int], timeout_seconds: float = 90.0) -> None:
    """Until none of the processes runs any more."""
    deadline = time.monotonic() + timeout_seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {[(pid, command_line(pid)) for pid in left]}"
        time.sleep(0.05)


def kill(pid: int) -> None:
    """End a process the hard way."""
    os.kill(pid, signal.SIGKILL)
