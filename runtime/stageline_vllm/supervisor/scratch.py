"""A supervisor's directory for sockets, state files and caches of vLLM, and the removal of those that were left behind.

A supervisor removes its directory when it ends; killed, it can't. So each holds a lock on a file in its own, which the
kernel drops with the process, whatever ended it: who can take the lock knows that the owner is gone. That holds between
containers that share a directory of the node too, where process ids would mean nothing; between machines that share one
it need not, so the file names the kernel that locks it. Only directories of our own user with such a file are removed.
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
        """The directory with all it holds; a second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the directories whose supervisors are gone, and say which; those in use and all else are left alone."""
    removed = []
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_abandoned(directory):
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
    return removed


def _is_abandoned(directory: Path) -> bool:
    """Raises OSError where that can't be said."""
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
    """A locked file under the lock's name, which it gets once it is locked: nobody finds it unlocked before.

    None where the file system knows no locks: nobody will remove the directory then.
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
    """Tells a running kernel from all others, and from itself before it was started anew."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def short_temporary_directory(environ: Mapping[str, str]) -> Path:
    """vLLM makes sockets there, whose paths may have a hundred characters."""
    given = environ.get("TMPDIR", "/tmp")
    return Path(given if len(given) <= LONGEST_PARENT else "/tmp")
