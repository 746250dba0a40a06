"""The keys in force: a file, or a directory of files as a Secret is mounted, read again whenever they change.

A new version that can't be used keeps the old one in force; that is said once in the log, without a word of what the
files hold, and shows in a metric. Nothing ever lets everyone in.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from stageline_api.errors import UserError
from stageline_gateway.admission.keys import KeyRing, KeysError, key_ring

logger = logging.getLogger(__name__)

Fingerprint = tuple[tuple[str, int, int, int], ...]
"""Name, inode, modification time in ns and size of each file."""


class KeysFile:
    """Reads `path`. `on_problem` is told whether an older version is in force."""

    def __init__(self, path: Path, on_problem: Callable[[bool], None] = lambda _: None) -> None:
        self._path = path
        self._on_problem = on_problem
        self._seen: Fingerprint | None = None
        self.problem = ""
        """Why the newest version could not be used, or empty."""
        try:
            self._seen = self._fingerprint()
            self.ring: KeyRing = self._read()
        except (OSError, KeysError) as error:
            raise UserError(f"The API keys can't be used: {_reason(error)}.") from None

    def refresh(self) -> None:
        try:
            found = self._fingerprint()
            if found == self._seen:
                return
            self._seen = found
            self.ring = self._read()
        except (OSError, KeysError) as error:
            if isinstance(error, OSError):
                self._seen = None
            self._fail(_reason(error))
            return
        logger.info("API keys read: keys=%d", len(self.ring.callers))
        self.problem = ""
        self._on_problem(False)

    async def watch(self, poll_seconds: float) -> None:
        while True:
            await asyncio.sleep(poll_seconds)
            self.refresh()

    def _files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        # A mounted Secret keeps its versions in directories whose names begin with dots.
        files = sorted(one for one in self._path.iterdir() if not one.name.startswith(".") and one.is_file())
        if not files:
            raise KeysError(f"the directory {self._path.name} holds no file")
        return files

    def _fingerprint(self) -> Fingerprint:
        found = [(one.name, one.stat()) for one in self._files()]
        return tuple((name, status.st_ino, status.st_mtime_ns, status.st_size) for name, status in found)

    def _read(self) -> KeyRing:
        return key_ring({one.name: one.read_bytes() for one in self._files()})

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("API keys can't be read again, those read before stay in force: %s", problem)
        self.problem = problem
        self._on_problem(True)


def _reason(error: OSError | KeysError) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
