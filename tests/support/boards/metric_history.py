"""The past of a made-up installation, as Prometheus would have scraped it: OpenMetrics text with timestamps.

A target counts as an exporter does and is read at every scrape. It takes metrics from the list that the real exporter
registers from and refuses labels that the real one doesn't have, so that no such past holds what can't be exported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from stageline_api.telemetry.metric_spec import MetricKind, MetricSpec

Labels = tuple[tuple[str, str], ...]
Spread = Sequence[tuple[float, float]]
"""(value, how often) of a histogram's samples."""


@dataclass(slots=True)
class MetricHistory:
    """All samples by metric, each a line without its line end."""

    lines: dict[str, list[str]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, family: str, kind: str, series: str, value: float, at_seconds: float) -> None:
        """One sample of a series that is already written out."""
        self.kinds[family] = kind
        self.lines.setdefault(family, []).append(f"{series} {value!r} {at_seconds:.3f}")

    def open_metrics(self) -> str:
        """What `promtool tsdb create-blocks-from openmetrics` reads."""
        return "".join(self._pieces()) + "# EOF\n"

    def _pieces(self) -> Iterator[str]:
        for family, lines in sorted(self.lines.items()):
            yield f"# TYPE {family} {self.kinds[family]}\n" + "\n".join(lines) + "\n"


def written(name: str, labels: Labels) -> str:
    """A series as it is written."""
    return name + "{" + ",".join(f'{key}="{text}"' for key, text in sorted(labels)) + "}"


@dataclass(slots=True)
class ScrapedTarget:
    """One process and the labels that a scrape adds to its series."""

    history: MetricHistory
    added: Mapping[str, str]
    values: dict[tuple[MetricSpec, Labels], float] = field(default_factory=dict)
    histograms: dict[tuple[MetricSpec, Labels], list[float]] = field(default_factory=dict)
    """Samples per bucket, the last one's bound being infinity, then the sum of their values."""
    series: dict[tuple[MetricSpec, Labels], list[str]] = field(default_factory=dict)
    """What each metric's samples are written as, made once."""

    def count(self, spec: MetricSpec, amount: float, **labels: str) -> None:
        """Let a counter grow; it is there from the first time on, if only by 0."""
        assert spec.kind is MetricKind.COUNTER, spec.name
        key = self._key(spec, labels)
        self.values[key] = self.values.get(key, 0.0) + amount

    def show(self, spec: MetricSpec, value: float, **labels: str) -> None:
        """Set a gauge."""
        assert spec.kind is MetricKind.GAUGE, spec.name
        self.values[self._key(spec, labels)] = value

    def hide(self, spec: MetricSpec) -> None:
        """Take all series of a gauge away."""
        self.values = {key: value for key, value in self.values.items() if key[0] is not spec}

    def observe(self, spec: MetricSpec, spread: Spread, **labels: str) -> None:
        """Add samples to a histogram."""
        assert spec.kind is MetricKind.HISTOGRAM, spec.name
        counts = self.histograms.setdefault(self._key(spec, labels), [0.0] * (len(spec.buckets) + 2))
        for value, times in spread:
            bucket = next((i for i, bound in enumerate(spec.buckets) if value <= bound), len(spec.buckets))
            counts[bucket] += times
            counts[-1] += value * times

    def scrape(self, at_seconds: float) -> None:
        """Write down everything as it is."""
        for key, value in self.values.items():
            (one,) = self.series.get(key) or self._write(key)
            self.history.add(key[0].family, str(key[0].kind), one, value, at_seconds)
        for key, counts in self.histograms.items():
            series = self.series.get(key) or self._write(key)
            numbers = (*accumulate(counts[:-1]), sum(counts[:-1]), counts[-1])
            for each, number in zip(series, numbers, strict=True):
                self.history.add(key[0].name, "histogram", each, number, at_seconds)

    def _write(self, key: tuple[MetricSpec, Labels]) -> list[str]:
        """The exporter's own labels win, as with `honorLabels`."""
        spec, own = key
        labels = tuple((dict(self.added) | dict(own)).items())
        if not spec.buckets:
            self.series[key] = [written(spec.name, labels)]
            return self.series[key]
        bounds = (*(repr(float(bound)) for bound in spec.buckets), "+Inf")
        buckets = [written(f"{spec.name}_bucket", (*labels, ("le", bound))) for bound in bounds]
        self.series[key] = [*buckets, written(f"{spec.name}_count", labels), written(f"{spec.name}_sum", labels)]
        return self.series[key]

    def _key(self, spec: MetricSpec, labels: Mapping[str, str]) -> tuple[MetricSpec, Labels]:
        assert set(labels) == set(spec.labels), f"{spec.name} has {spec.labels}, not {tuple(labels)}"
        return spec, tuple((name, labels[name]) for name in spec.labels)
