"""Which groups exist, on one machine: the endpoints file, looked at often and read when it was replaced.

Its writer replaces it by rename, so a read sees one whole version.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from stageline_api.endpoints import Endpoints
from stageline_gateway.errors import shown
from stageline_gateway.groups.backends import DiscoveredGroups

FileIdentity = tuple[int, int, int]
"""Inode, modification time in ns, size: at least one of them changes when a file is replaced."""


@dataclass(slots=True)
class EndpointsFile:
    path: Path
    discovered: DiscoveredGroups
    poll_seconds: float
    _identity: FileIdentity | None = None
    _good_at: float = field(default_factory=time.monotonic)

    def age_seconds(self) -> float:
        """Since the file was last found to be the version in force; since the beginning where it never was."""
        return time.monotonic() - self._good_at

    def refresh(self) -> None:
        try:
            found = self.path.stat()
            identity = (found.st_ino, found.st_mtime_ns, found.st_size)
            if identity == self._identity:
                if not self.discovered.problem:
                    self._good_at = time.monotonic()
                return
            content = self.path.read_bytes()
        except OSError as error:
            self._identity = None
            self.discovered.fail(f"endpoints file {self.path} can't be read: {error.strerror}")
            return
        self._identity = identity
        try:
            endpoints = Endpoints.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(step) for step in first["loc"]) or "top level"
            message = f"is malformed at {where}: {first['msg']}; {shown(first['input'])}"
            self.discovered.fail(f"endpoints file {self.path} {message}")
            return
        self._good_at = time.monotonic()
        self.discovered.accept(endpoints)

    async def run(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(self.poll_seconds)
