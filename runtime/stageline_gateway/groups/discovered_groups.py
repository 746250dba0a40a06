"""What discovery has found: the groups in force, whoever found them, and whether they may be out of date.

A version that can't be had keeps the last good one in force, is said once in the log, and shows in a metric; it never
empties the gateway.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stageline_api.endpoints import DEFAULT_RESUME_WINDOW_SECONDS, Endpoints, GroupEndpoint

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Served:
    """The last good version. `problem` is why the newest could not be had, or empty."""

    source: str
    """What is looked at, as a person would name it."""
    on_change: Callable[[Endpoints], None] = lambda _: None
    on_problem: Callable[[bool], None] = lambda _: None
    current: Endpoints = field(default_factory=Endpoints)
    ever_read: bool = False
    problem: str = ""
    first_seen: dict[str, int] = field(default_factory=dict)
    """Served name -> unix time it first appeared, OpenAI's `created` of a model."""

    def models(self) -> tuple[str, ...]:
        """Served names, in the order found."""
        return tuple(dict.fromkeys([*(group.model for group in self.current.groups), *self.current.models]))

    def fail(self, problem: str) -> None:
        """The newest version can't be had."""
        if problem != self.problem:
            consequence = "the last good version stays in force" if self.ever_read else "nothing is served yet"
            logger.warning("%s; %s", problem, consequence)
        self.problem = problem
        self.on_problem(True)

    def accept(self, endpoints: Endpoints) -> None:
        """Put a version in force."""
        if self.problem or endpoints != self.current or not self.ever_read:
            ready = sum(group.ready for group in endpoints.groups)
            logger.info("%s read: groups=%d ready=%d", self.source, len(endpoints.groups), ready)
        self.current, self.ever_read, self.problem = endpoints, True, ""
        self.first_seen = {name: self.first_seen.get(name, int(time.time())) for name in self.models()}
        self.on_problem(False)
        self.on_change(endpoints)

    def resume_window_seconds(self, model: str) -> float:
        """How long an answer of `model` that has begun waits for a group that continues it."""
        return self.current.resume_window_seconds.get(model, DEFAULT_RESUME_WINDOW_SECONDS)

    def groups_of(self, model: str) -> tuple[GroupEndpoint, ...]:
        """All groups that are said to serve `model`, ready or not."""
        return tuple(group for group in self.current.groups if group.model == model)
