"""How many groups a model wants, by what the engines of its ready groups say of their load. Pure.

Groups are added as soon as a request has waited for `queueSeconds` and there are more requests than the groups that
are there, or on their way, can run: as many as those would fill, and at most as many as there are already. A group that
lets requests wait can run what it runs now, whether its slots or its KV cache is full.

Groups are taken away once fewer have been enough for `scaleInSeconds` on end, none of which anybody waited: as many
stay as the busiest moment of that time needed, each filled to `targetLoadPercent`. An engine that does not answer is
never taken for an idle one: without an answer of every ready group nothing is taken away.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from stageline_api.resource.life.autoscaling import AutoscalingSpec


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What one engine says of its requests."""

    running: int
    waiting: int
    slots: int
    """How many can run at once at most, at least 1."""
    kv_usage: float = 0.0
    """Share of the KV cache that running requests hold, 0 to 1."""
    longest_wait_seconds: float = 0.0

    @property
    def capacity(self) -> int:
        """How many requests it can run, as far as is known."""
        return max(1, min(self.running, self.slots)) if self.waiting else self.slots

    @property
    def full(self) -> float:
        """How full it is, of 1: its slots or its KV cache, whichever is fuller."""
        return max(self.running / self.slots, self.kv_usage)


@dataclass(frozen=True, slots=True)
class Surplus:
    """Since when fewer groups than there are have been enough, and how many were needed at most since."""

    since_seconds: float
    needed: int


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many groups there should be. `why` is a sentence where that is another number than before."""

    replicas: int
    why: str = ""
    surplus: Surplus | None = None
    """To be handed to the next decision."""


def decide(
    spec: AutoscalingSpec,
    replicas: int,
    num_ready: int,
    loads: Collection[GroupLoad],
    surplus: Surplus | None,
    now_seconds: float,
) -> Scaling:
    """What `replicas` should be; `loads` are those of the `num_ready` ready groups that answered."""
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
    return Scaling(since.needed, f"so many have been enough for {spec.scale_in_seconds} s, {rule}")
