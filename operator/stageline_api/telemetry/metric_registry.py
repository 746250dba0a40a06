"""Creates prometheus_client's collectors from the lists of metrics, and renders them in the scraper's format.

Creation times are omitted: they would double the series, and Prometheus detects resets without them.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from stageline_api.telemetry.metric_spec import MetricSpec


class MetricRegistry:
    """The metrics of one component, separate from other components in the process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.collectors = CollectorRegistry()

    def counter(self, spec: MetricSpec) -> Counter:
        return Counter(spec.name, spec.help, spec.labels, registry=self.collectors)

    def gauge(self, spec: MetricSpec) -> Gauge:
        return Gauge(spec.name, spec.help, spec.labels, registry=self.collectors)

    def histogram(self, spec: MetricSpec) -> Histogram:
        return Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=self.collectors)

    def add(self, collector: Collector) -> None:
        self.collectors.register(collector)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics and their content type: OpenMetrics, the only format with exemplars, if `accept` names it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.collectors), content_type
