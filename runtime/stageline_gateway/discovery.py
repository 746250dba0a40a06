"""Which groups exist: the endpoints file, looked at every fraction of a second and read when it was replaced.

Its writer replaces it by rename, so a read sees one whole version. A file that is malformed or gone keeps the last
good version in force, is said once in the log, and shows in a metric; it never empties the gateway.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_gateway.errors import shown

logger = logging.getLogger(__name__)

FileIdentity = tuple[int, int, int]
"""Inode, modification time in ns, size: at least one of them changes when a file is replaced."""


@dataclass(slots=True)
class EndpointsFile:
    """The last good version of the endpoints file. `problem` is why the newest version could not be used, or empty."""

    path: Path
    on_change: Callable[[Endpoints], None] = lambda _: None
    on_problem: Callable[[bool], None] = lambda _: None
    current: Endpoints = field(default_factory=Endpoints)
    ever_read: bool = False
    problem: str = ""
    first_seen: dict[str, int] = field(default_factory=dict)
    """Served name -> unix time it first appeared, OpenAI's `created` of a model."""
    _identity: FileIdentity | None = None

    def refresh(self) -> None:
        """Look at the file, and read it if it is another one than last time."""
        try:
            found = self.path.stat()
            identity = (found.st_ino, found.st_mtime_ns, found.st_size)
            if identity == self._identity:
                return
            content = self.path.read_bytes()
        except OSError as error:
            self._identity = None
            self._fail(f"endpoints file {self.path} can't be read: {error.strerror}")
            return
        self._identity = identity
        try:
            endpoints = Endpoints.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(step) for step in first["loc"]) or "top level"
            self._fail(f"endpoints file {self.path} is malformed at {where}: {first['msg']}; {shown(first['input'])}")
            return
        self._accept(endpoints)

    def groups_of(self, model: str) -> tuple[GroupEndpoint, ...]:
        """All groups that serve `model`, ready or not."""
        return tuple(group for group in self.current.groups if group.model == model)

    def models(self) -> tuple[str, ...]:
        """Served names, in the file's order."""
        return tuple(dict.fromkeys(group.model for group in self.current.groups))

    async def watch(self, poll_seconds: float) -> None:
        """Keep looking until cancelled."""
        while True:
            self.refresh()
            await asyncio.sleep(poll_seconds)

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            consequence = "the last good version stays in force" if self.ever_read else "nothing is served yet"
            logger.warning("%s; %s", problem, consequence)
        self.problem = problem
        self.on_problem(True)

    def _accept(self, endpoints: Endpoints) -> None:
        if self.problem or endpoints != self.current:
            ready = sum(group.ready for group in endpoints.groups)
            logger.info("endpoints file read: groups=%d ready=%d", len(endpoints.groups), ready)
        self.current, self.ever_read, self.problem = endpoints, True, ""
        self.first_seen = {name: self.first_seen.get(name, int(time.time())) for name in self.models()}
        self.on_problem(False)
        self.on_change(endpoints)
