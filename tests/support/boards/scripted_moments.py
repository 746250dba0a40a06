"""What a script says of an installation at one moment: how long steps take, how much there is to do, what clients see.

Everything else follows from how a pipeline works: all stages take turns at the pace of the slowest one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from boards.metric_history import Spread
from stageline_api.health import Phase

SPREAD: Final = ((0.5, 0.10), (0.8, 0.20), (1.0, 0.40), (1.3, 0.25), (2.0, 0.05))
"""Multiples of a typical duration, and how many of all samples take that long."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group at one moment. `step_seconds` are of a decode step on each stage.

    The busiest stage computes for `load` of the time and the group has work for `engaged` of it; what a stage doesn't
    compute of that it waits.
    """

    step_seconds: tuple[float, ...]
    load: float
    engaged: float
    incarnation: int = 1
    running: int = 12
    waiting: int = 0
    kv_usage: float = 0.4
    preemptions_per_second: float = 0.0
    drafted_rows_per_second: float = 0.0
    """Rows with four drafts, of which three hold."""
    queue_seconds: float = 0.02
    stage_phase: Phase = Phase.READY

    def busy(self, stage: int) -> float:
        """Share of the time that a stage computes."""
        return self.load * self.step_seconds[stage] / max(self.step_seconds)

    def wait(self, stage: int) -> float:
        """Share of the time that it waits while there is work."""
        return max(self.engaged - self.busy(stage), 0.0)

    @property
    def steps_per_second(self) -> float:
        """The same for all stages."""
        return self.load / max(self.step_seconds)


@dataclass(frozen=True, slots=True)
class Clients:
    """What clients of a model see at one moment. Requests are per second and by status."""

    requests: Mapping[str, float] = field(default_factory=dict)
    first_token_seconds: float = 0.3
    output_token_seconds: float = 0.05
    tokens_per_answer: int = 80
    queued: int = 0
    in_flight: int = 0
    broken_per_second: float = 0.0
    losses: Mapping[str, float] = field(default_factory=dict)
    resumes: Mapping[str, float] = field(default_factory=dict)
    refused_per_second: float = 0.0
    slow_readers_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model at one moment. A group that is None has no pods."""

    clients: Clients
    groups: tuple[Group | None, ...]
    phases: Mapping[int, str] = field(default_factory=dict)
    """Phases of groups other than Ready, by index."""
    incarnations: Mapping[int, int] = field(default_factory=dict)
    """Those other than 1, by index."""
    failures: Mapping[str, float] = field(default_factory=dict)
    """Failures of groups by class, since the last moment."""
    missed: float = 0.0
    """Pods whose end the operator's watch missed and a full list showed, since the last moment."""
    recovered_seconds: tuple[float, ...] = ()
    """How long groups that came back since the last moment had been gone."""
    stages: int = 3

    @property
    def ready(self) -> int:
        """Groups that answer."""
        return sum(self.phase(index) == "Ready" for index in range(len(self.groups)))

    @property
    def up(self) -> int:
        """Groups that have pods, which are those that a gateway knows."""
        return sum(group is not None for group in self.groups)

    def phase(self, index: int) -> str:
        """A group's, in the operator's words."""
        return self.phases.get(index, "Ready")


Moment = Mapping[str, Model]


def spread_around(typical: float, how_many: float) -> Spread:
    """Samples about a typical value."""
    return [(typical * factor, how_many * share) for factor, share in SPREAD]
