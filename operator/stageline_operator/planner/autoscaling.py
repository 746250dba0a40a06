"""Computes the number of groups of a model from the load that the engines of its ready groups report. Pure.

Scale-out: a request has waited for `queueSeconds`, and there are more requests than all groups, running and starting,
can run. The new number is enough to run all requests, and at most twice the current one. The capacity of a group whose
requests wait is the number that it runs now, because its slots or its KV cache are full.

Scale-in: fewer groups were enough for `scaleInSeconds` without a break, and no request waited. The peak load of that
window, with each group filled to `targetLoadPercent`, decides how many remain. An engine that does not answer is not
counted as idle: no group is removed unless every ready group answered.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from stageline_api.resource.life.autoscaling import AutoscalingSpec


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The requests of one engine."""

    running: int
    waiting: int
    slots: int
    """Maximum number of concurrent requests, at least 1."""
    kv_usage: float = 0.0
    """Share of the KV cache that running requests hold, 0 to 1."""
    longest_wait_seconds: float = 0.0

    @property
    def capacity(self) -> int:
        """Number of requests that the engine can run, as far as known."""
        return max(1, min(self.running, self.slots)) if self.waiting else self.slots

    @property
    def full(self) -> float:
        """The larger of slot usage and KV cache usage, as a fraction of 1."""
        return max(self.running / self.slots, self.kv_usage)


@dataclass(frozen=True, slots=True)
class Surplus:
    """How long fewer groups than the current number have been enough, and the peak number needed in that time."""

    since_seconds: float
    needed: int


@dataclass(frozen=True, slots=True)
class Scaling:
    """The wanted number of groups. `why` is a sentence if the number changes."""

    replicas: int
    why: str = ""
    surplus: Surplus | None = None
    """Pass it to the next decision."""


def decide(
    spec: AutoscalingSpec,
    replicas: int,
    num_ready: int,
    loads: Collection[GroupLoad],
    surplus: Surplus | None,
    now_seconds: float,
) -> Scaling:
    """Compute `replicas`; `loads` belong to those of the `num_ready` ready groups that answered."""
    if replicas < spec.min_replicas:
        return Scaling(spec.min_replicas, f"autoscaling.minReplicas is {spec.min_replicas}")
    if replicas > spec.max_replicas:
        return Scaling(spec.max_replicas, f"autoscaling.maxReplicas is {spec.max_replicas}")
    if not loads:
        return Scaling(replicas)
    longest_wait = max(load.longest_wait_seconds for load in loads)
    if longest_wait >= spec.queue_seconds:
        return _more(spec, replicas, loads, longest_wait)
    if num_ready != replicas or len(loads) < num_ready or any(load.waiting for load in loads):
        return Scaling(replicas)
    return _fewer(spec, replicas, loads, surplus, now_seconds)


def _more(spec: AutoscalingSpec, replicas: int, loads: Collection[GroupLoad], longest_wait: float) -> Scaling:
    requests = sum(load.running + load.waiting for load in loads)
    runnable = sum(load.capacity for load in loads) / len(loads)
    wanted = min(ceil(requests / runnable), 2 * replicas, spec.max_replicas)
    if wanted <= replicas:
        return Scaling(replicas)
    rule = f"autoscaling.queueSeconds is {spec.queue_seconds}"
    return Scaling(wanted, f"a request has waited for {longest_wait:.0f} s ({rule}), with {requests} in all")


def _fewer(
    spec: AutoscalingSpec,
    replicas: int,
    loads: Collection[GroupLoad],
    surplus: Surplus | None,
    now_seconds: float,
) -> Scaling:
    groups = sum(load.full for load in loads) * 100 / spec.target_load_percent
    needed = max(spec.min_replicas, ceil(round(groups, 6)))
    if needed >= replicas:
        return Scaling(replicas)
    since = surplus or Surplus(now_seconds, needed)
    since = Surplus(since.since_seconds, max(since.needed, needed))
    if now_seconds - since.since_seconds < spec.scale_in_seconds:
        return Scaling(replicas, surplus=since)
    rule = f"at {spec.target_load_percent} % of what they can run (autoscaling.targetLoadPercent)"
    return Scaling(since.needed, f"that was enough for {spec.scale_in_seconds} s, {rule}")
