"""One page of metrics for several workers: each reports its samples, and equal series become one.

Counters and histograms are added up. Of a gauge `metric_names.GAUGES_OF_WORKERS` says what stands for all. What a
worker that has ended had counted goes on in the report of the one that took its place, so that no counter ever goes
back; its gauges ended with it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from stageline_gateway.telemetry.metric_names import GAUGES_OF_WORKERS, GROUPS, OfWorkers

_GAUGE: Final = "gauge"
_HOW: Final[Mapping[OfWorkers, Callable[[float, float], float]]] = {
    OfWorkers.SUM: lambda one, other: one + other,
    OfWorkers.HIGHEST: max,
    OfWorkers.LOWEST: min,
}


class ExemplarReport(msgspec.Struct, frozen=True, array_like=True):
    labels: dict[str, str]
    value: float
    at_seconds: float


class SampleReport(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float
    exemplar: ExemplarReport | None = None


class FamilyReport(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    help: str
    samples: list[SampleReport]


Report = list[FamilyReport]
_decoder: Final = msgspec.msgpack.Decoder(Report)


def report_of(families: Iterable[Metric]) -> Report:
    return [
        FamilyReport(one.name, one.type, one.documentation, [_sample_report(sample) for sample in one.samples])
        for one in families
    ]


def _sample_report(sample: Sample) -> SampleReport:
    found = sample.exemplar
    exemplar = None if found is None else ExemplarReport(dict(found.labels), found.value, float(found.timestamp or 0.0))
    return SampleReport(sample.name, dict(sample.labels), float(sample.value), exemplar)


def encoded(report: Report) -> bytes:
    return msgspec.msgpack.encode(report)


def decoded(body: bytes) -> Report:
    """What `encoded` made; nothing of nothing."""
    return _decoder.decode(body) if body else []


def counted(report: Report) -> Report:
    """What stays true of a worker that has ended."""
    return [family for family in report if family.kind != _GAUGE]


def added(reports: Iterable[Report]) -> list[Metric]:
    """The families of all, each series once."""
    families: dict[str, Metric] = {}
    series: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], SampleReport]] = {}
    for report in reports:
        for family in report:
            families.setdefault(family.name, Metric(family.name, family.help, family.kind))
            of_family = series.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                known = of_family.get(key)
                of_family[key] = sample if known is None else _both(family, known, sample)
    for name, metric in families.items():
        for sample in series[name].values():
            metric.add_sample(sample.name, sample.labels, sample.value, exemplar=_exemplar(sample.exemplar))
    return list(families.values())


def _both(family: FamilyReport, one: SampleReport, other: SampleReport) -> SampleReport:
    how = OfWorkers.SUM if family.kind != _GAUGE else _gauge_of_workers(family.name, one.labels)
    exemplars = [each for each in (one.exemplar, other.exemplar) if each is not None]
    newest = max(exemplars, key=lambda each: each.at_seconds, default=None)
    return SampleReport(one.name, one.labels, _HOW[how](one.value, other.value), newest)


def _gauge_of_workers(name: str, labels: Mapping[str, str]) -> OfWorkers:
    if name == GROUPS.name:  # which are ready for all, and which are not for some: together as many as there are
        return OfWorkers.LOWEST if labels["ready"] == "true" else OfWorkers.HIGHEST
    return GAUGES_OF_WORKERS[name]


def _exemplar(found: ExemplarReport | None) -> Exemplar | None:
    return None if found is None else Exemplar(found.labels, found.value, found.at_seconds)


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def exposition(reports: Iterable[Report], accept: str) -> tuple[bytes, str]:
    """The page, and its content type; as `MetricRegistry.exposition`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(added(reports)))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
