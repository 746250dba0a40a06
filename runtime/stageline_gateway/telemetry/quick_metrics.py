"""Counters and histograms for what happens at every token, a tenth of the price of prometheus_client's own.

They have one writer, the event loop's thread, so they need no lock; a scrape reads whole numbers. A child is looked up
once for a request and then only counted on.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from stageline_api.telemetry.metric_spec import MetricSpec


@dataclass(slots=True)
class QuickCount:
    value: int = 0


@dataclass(slots=True)
class QuickSeries:
    """One histogram."""

    bounds: tuple[float, ...]
    counts: list[int]
    """Count of each bucket alone; the last one is above all bounds."""
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True, eq=False)
class QuickCounter(Collector):
    spec: MetricSpec
    _children: dict[tuple[str, ...], QuickCount] = field(default_factory=dict)

    def of(self, *labels: str) -> QuickCount:
        """That of these values of the metric's labels; it is exposed from now on."""
        return self._children.setdefault(labels, QuickCount())

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        for labels, child in tuple(self._children.items()):
            family.add_metric(labels, child.value)
        yield family


@dataclass(slots=True, eq=False)
class QuickHistogram(Collector):
    spec: MetricSpec
    _children: dict[tuple[str, ...], QuickSeries] = field(default_factory=dict)

    def of(self, *labels: str) -> QuickSeries:
        """That of these values of the metric's labels; it is exposed from now on."""
        found = self._children.get(labels)
        if found is None:
            bounds = self.spec.buckets
            found = self._children[labels] = QuickSeries(bounds, [0] * (len(bounds) + 1))
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.spec.name, self.spec.help, labels=self.spec.labels)
        names = [*map(floatToGoString, self.spec.buckets), "+Inf"]
        for labels, child in tuple(self._children.items()):
            counted = list(zip(names, map(float, accumulate(child.counts)), strict=True))
            family.add_metric(labels, counted, child.total)
        yield family
