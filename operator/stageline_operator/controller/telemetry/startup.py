"""The phases of a group's start and their duration, from its pods' timestamps. Pure.

A phase ends when the group's last pod has finished it, so phases add up to the total. Unknown phases are omitted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from stageline_api.health import PrepareOutcome
from stageline_operator.planner.observed.container_end import moment


class StartupPhase(StrEnum):
    SCHEDULE = "schedule"
    """From the first pod's creation until the last pod has a node."""
    PULL = "pull"
    """Images, volumes and containers, before and after `prepare`."""
    PREPARE = "prepare"
    """`prepare` runs: it fetches the model's files or finds them in the cache."""
    START = "start"
    """From running containers to a ready group: weights, rendezvous, warm-up. Stages report these parts themselves."""


class Cache(StrEnum):
    COLD = "cold"
    """At least one pod of the group fetched the model."""
    WARM = "warm"
    UNKNOWN = "unknown"
    """Not all of its pods report it."""


@dataclass(frozen=True)
class Startup:
    seconds: float
    cache: Cache = Cache.UNKNOWN
    phases: Mapping[StartupPhase, float] = field(default_factory=dict)


def startup_of(pods: Sequence[Mapping[str, Any]], ready_at: datetime) -> Startup | None:
    """The start of a group's pods of one incarnation; None if their creation time is unknown."""
    created = [made for pod in pods if (made := moment(pod["metadata"].get("creationTimestamp"))) is not None]
    if not created:
        return None
    scheduled = _last(_scheduled_at(pod) for pod in pods)
    preparing = _last(_first_start(pod) for pod in pods)
    prepared = _last(_last_finish(pod) for pod in pods)
    running = _last(_all_running(pod) for pod in pods)
    phases = {
        StartupPhase.SCHEDULE: _between(min(created), scheduled),
        StartupPhase.PULL: _sum(_between(scheduled, preparing), _between(prepared, running)),
        StartupPhase.PREPARE: _between(preparing, prepared),
        StartupPhase.START: _between(running, ready_at),
    }
    known = {phase: seconds for phase, seconds in phases.items() if seconds is not None}
    return Startup((ready_at - min(created)).total_seconds(), _cache(pods), known)


def _cache(pods: Iterable[Mapping[str, Any]]) -> Cache:
    said = {next((end.get("message") for end in _init_ends(pod) if end.get("message")), "") for pod in pods}
    if PrepareOutcome.FETCHED in said:
        return Cache.COLD
    return Cache.WARM if said == {PrepareOutcome.CACHED} else Cache.UNKNOWN


def _scheduled_at(pod: Mapping[str, Any]) -> datetime | None:
    """A process node has no separate scheduling time: it starts a pod at once, at `startTime`."""
    status = pod.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    return moment(conditions.get("PodScheduled", {}).get("lastTransitionTime") or status.get("startTime"))


def _init_ends(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    statuses = pod.get("status", {}).get("initContainerStatuses", [])
    return [each.get("state", {}).get("terminated", {}) for each in statuses]


def _first_start(pod: Mapping[str, Any]) -> datetime | None:
    return moment(next((end.get("startedAt") for end in _init_ends(pod)), None))


def _last_finish(pod: Mapping[str, Any]) -> datetime | None:
    return _last(moment(end.get("finishedAt")) for end in _init_ends(pod))


def _all_running(pod: Mapping[str, Any]) -> datetime | None:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return _last(moment(each.get("state", {}).get("running", {}).get("startedAt")) for each in statuses)


def _last(moments: Iterable[datetime | None]) -> datetime | None:
    """The latest time; None if one is unknown or there are none."""
    found = list(moments)
    known = [each for each in found if each is not None]
    return max(known) if known and len(known) == len(found) else None


def _between(start: datetime | None, end: datetime | None) -> float | None:
    """At least 0: Kubernetes rounds to seconds, and the last pod to start may prepare before another."""
    return None if start is None or end is None else max(0.0, (end - start).total_seconds())


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
