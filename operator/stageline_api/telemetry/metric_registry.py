"""Makes prometheus_client's collectors from the lists of metrics, and renders them in the form that a scraper asks for.

Creation times are left out: they would double the series, and Prometheus finds resets without them.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from stageline_api.telemetry.metric_spec import MetricSpec


class MetricRegistry:
    """The metrics of one component, apart from every other's in the process."""

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
        """Everything, and its content type: OpenMetrics, which alone has exemplars, where `accept` names it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.collectors), content_type
