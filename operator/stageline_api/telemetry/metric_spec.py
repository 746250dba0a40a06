"""A metric's name, help text, labels and buckets: the form of every component's list of metrics. Pure.

Exporters register these lists, and boards, rules and the metrics page read names from them, so that all of them agree.
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
        """The family name in prometheus_client's parser: a counter's without `_total`."""
        return self.name.removesuffix("_total")

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names that a query may select."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def sample_names(specs: Iterable[MetricSpec]) -> frozenset[str]:
    """Every name that a query on `specs` may select."""
    return frozenset(name for spec in specs for name in spec.sample_names)
