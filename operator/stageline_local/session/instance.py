"""Finds a running `stageline up` from other processes: a lock held while it runs, and a record of its process.

The lock shows whether an instance is up; the record identifies its process. The start time in it distinguishes that
process from a later one with the same id.
"""

import fcntl
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from stageline_api.errors import UserError
from stageline_local.replaced_file import replace_file

_LOCK: Final = "lock"
_RECORD: Final = "instance.json"


@dataclass(frozen=True)
class InstanceRecord:
    """The process that serves a model. `start_ticks` is its start time in clock ticks since boot."""

    name: str
    pid: int
    start_ticks: int
    url: str
    ready: bool = False

    def is_running(self) -> bool:
        return process_start_ticks(self.pid) == self.start_ticks


def default_state_root() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "stageline"


def default_cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "stageline"


def process_start_ticks(pid: int) -> int | None:
    """Field 22 of `/proc/<pid>/stat`; None if there is no such process or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name (field 2) may contain spaces and brackets: count from its closing bracket.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def read_record(state_dir: Path) -> InstanceRecord | None:
    """The record of an instance, running or not; None if there is none."""
    try:
        return InstanceRecord(**json.loads((state_dir / _RECORD).read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def running_instances(state_root: Path) -> list[InstanceRecord]:
    """Instances with a running process; a record of a killed process does not count."""
    if not state_root.is_dir():
        return []
    records = [read_record(each) for each in sorted(state_root.iterdir())]
    return [record for record in records if record is not None and record.is_running()]


class Instance:
    """This process's claim on a state directory."""

    def __init__(self, state_dir: Path, lock_fd: int, record: InstanceRecord) -> None:
        self.state_dir = state_dir
        self.record = record
        self._lock_fd = lock_fd

    @classmethod
    def claim(cls, state_dir: Path, name: str, url: str) -> "Instance":
        """Claim the directory; raises `UserError` with the process that holds it."""
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = os.open(state_dir / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            holder = read_record(state_dir)
            who = f" (pid {holder.pid}, {holder.url})" if holder is not None else ""
            raise UserError(f"{name} is already up{who}; stop it with: stageline down {name}") from None
        start_ticks = process_start_ticks(os.getpid())
        assert start_ticks is not None, "this process has no entry in /proc"
        instance = cls(state_dir, lock_fd, InstanceRecord(name, os.getpid(), start_ticks, url))
        instance._write()
        return instance

    def mark_ready(self) -> None:
        """Notify processes that wait for the instance that it is ready."""
        if not self.record.ready:
            self.record = replace(self.record, ready=True)
            self._write()

    def release(self) -> None:
        (self.state_dir / _RECORD).unlink(missing_ok=True)
        os.close(self._lock_fd)

    def _write(self) -> None:
        replace_file(self.state_dir / _RECORD, json.dumps(asdict(self.record)) + "\n")
