"""The samples of one scrape of a Prometheus endpoint, with sums over labels. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Samples:
    """All samples by their exposed name (including `_total`, `_bucket` and so on)."""

    by_name: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples with these labels; 0 if there is none."""
        return sum(sample.value for sample in self._with(name, labels))

    def value(self, name: str, **labels: str) -> float | None:
        found = self._with(name, labels)
        return sum(sample.value for sample in found) if found else None

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = {}
        for sample in self._with(name, labels):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def of_namespace(self, namespace: str) -> "Samples":
        """Samples of this namespace, and those without one: a local gateway has none."""
        mine = ("", namespace)
        return Samples(
            {
                name: tuple(sample for sample in samples if sample.labels.get("namespace", "") in mine)
                for name, samples in self.by_name.items()
            }
        )

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound, the last one infinite."""
        return {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le", **labels).items()}

    def _with(self, name: str, labels: Mapping[str, str]) -> list[Sample]:
        return [
            sample
            for sample in self.by_name.get(name, ())
            if all(sample.labels.get(label) == value for label, value in labels.items())
        ]


def parse_samples(exposition: str) -> Samples:
    """Samples of an exposition in the text format; raises `ValueError` if it is malformed."""
    by_name: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    return Samples({name: tuple(samples) for name, samples in by_name.items()})
