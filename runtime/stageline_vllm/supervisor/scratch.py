"""A supervisor's directory for vLLM's sockets, state files and caches, and the removal of abandoned ones.

A supervisor removes its directory when it ends, unless it is killed. So each supervisor locks a file in its
directory; the kernel releases the lock when the process ends for any reason. A process that acquires the lock knows
that the owner is gone. This also works between containers that share a directory of the node, where process ids
mean nothing. Between machines that share one it may fail, so the file names the kernel that locks it. Only
directories of our own user with such a file are removed.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PREFIX: Final = "vllm-"
LOCK_NAME: Final = "supervisor.lock"
LONGEST_PARENT: Final = 40


class Scratch:
    """A new directory in `parent`, kept from others until `remove`, or until this process is gone."""

    def __init__(self, parent: Path) -> None:
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = _locked_file(self.path)

    def remove(self) -> None:
        """Remove the directory and its content; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the directories of ended supervisors and return them; directories in use and all others stay."""
    removed = []
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_abandoned(directory):
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
    return removed


def _is_abandoned(directory: Path) -> bool:
    """Raises OSError where that can't be determined."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.read(lock, 100) == _kernel()
    finally:
        os.close(lock)


def _locked_file(directory: Path) -> int | None:
    """Create a locked file. It gets the lock's name only after it is locked, so no process finds it unlocked.

    None where the file system supports no locks: the directory is then never removed as abandoned.
    """
    making = directory / f"{LOCK_NAME}.new"
    lock = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    os.write(lock, _kernel())
    making.rename(directory / LOCK_NAME)
    return lock


def _kernel() -> bytes:
    """Identifies a running kernel; a reboot changes it."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def short_temporary_directory(environ: Mapping[str, str]) -> Path:
    """Parent for vLLM's sockets, because a socket path is limited to about a hundred characters."""
    given = environ.get("TMPDIR", "/tmp")
    return Path(given if len(given) <= LONGEST_PARENT else "/tmp")
