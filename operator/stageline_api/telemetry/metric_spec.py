"""A metric's name, help text, labels and buckets: the form of every component's list of metrics. Pure.

Such lists are what exporters register from, and what boards, rules and the page of metrics take names from, so that
none of them can drift from what is exported.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

Buckets = tuple[float, ...]
"""Upper bounds, ascending, without +Inf."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric, named as it is exposed: counters end in `_total`. `buckets` make it a histogram."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: Buckets = ()

    @property
    def kind(self) -> MetricKind:
        if self.buckets:
            return MetricKind.HISTOGRAM
        return MetricKind.COUNTER if self.name.endswith("_total") else MetricKind.GAUGE

    @property
    def family(self) -> str:
        """The name as prometheus_client's parser gives it for a family: a counter's without `_total`."""
        return self.name.removesuffix("_total")

    @property
    def sample_names(self) -> tuple[str, ...]:
        """What a query may select."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def sample_names(specs: Iterable[MetricSpec]) -> frozenset[str]:
    """Every name that a query about `specs` may select."""
    return frozenset(name for spec in specs for name in spec.sample_names)
