"""Gauges of what the gateway reads from outside: groups, keys, certificate; and how fresh they are."""

from collections.abc import Callable, Iterator
from datetime import datetime
from importlib.metadata import version

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_gateway.telemetry import metric_names as names


class _Expiry(Collector):
    """No sample while there is no certificate: a time of 0 would look like one that expired long ago."""

    def __init__(self) -> None:
        self.at: datetime | None = None

    def collect(self) -> Iterator[Metric]:
        spec = names.TLS_EXPIRY
        yield GaugeMetricFamily(spec.name, spec.help, value=None if self.at is None else self.at.timestamp())


class StateGauges:
    """Of one gateway. What is not in use (keys, TLS) has no trouble: its gauge stays 0."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._keys_stale = registry.gauge(names.KEYS_STALE)
        self._tls_stale = registry.gauge(names.TLS_STALE)
        self._endpoints_stale = registry.gauge(names.ENDPOINTS_STALE)
        self._discovery_age = registry.gauge(names.DISCOVERY_AGE)
        self._tls_expiry = _Expiry()
        registry.add(self._tls_expiry)
        registry.gauge(names.BUILD_INFO).labels(version("stageline")).set(1)

    def keys_stale(self, stale: bool) -> None:
        """Say whether the keys in force are an older version."""
        self._keys_stale.set(float(stale))

    def endpoints_stale(self, stale: bool) -> None:
        """Say whether the groups in force are an older version."""
        self._endpoints_stale.set(float(stale))

    def follow_discovery(self, age_seconds: Callable[[], float]) -> None:
        """Ask at each scrape how long ago discovery last heard anything."""
        self._discovery_age.set_function(age_seconds)

    def certificate_read(self, expires_at: datetime | None) -> None:
        """A certificate and its key are in force; None when it doesn't say until when."""
        self._tls_expiry.at = expires_at
        self._tls_stale.set(0)

    def certificate_stale(self) -> None:
        """Newer files can't be used."""
        self._tls_stale.set(1)
