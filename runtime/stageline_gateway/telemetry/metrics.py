"""The gateway's metrics, each registered from its line in `metric_names`, on a registry of their own.

Only names of models that are served become label values: a client can't grow the number of series.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_gateway.engine_client.generation import LossKind
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


RESUME_OUTCOMES: Final = ("resumed", "moved", "expired", "refused", "exhausted")


class GatewayMetrics:
    """All collectors of one gateway."""

    def __init__(self) -> None:
        self.registry = registry = MetricRegistry()
        self.time_to_first_token = registry.histogram(names.TIME_TO_FIRST_TOKEN)
        self.time_per_output_token = registry.histogram(names.TIME_PER_OUTPUT_TOKEN)
        self.inter_token_latency = registry.histogram(names.INTER_TOKEN_LATENCY)
        self.queue_time = registry.histogram(names.QUEUE_TIME)
        self.e2e_request_latency = registry.histogram(names.E2E_REQUEST_LATENCY)
        self.requests = registry.counter(names.REQUESTS)
        self.prompt_tokens = registry.counter(names.PROMPT_TOKENS)
        self.generation_tokens = registry.counter(names.GENERATION_TOKENS)
        self.broken_answers = registry.counter(names.BROKEN_ANSWERS)
        self.slow_readers = registry.counter(names.SLOW_READERS)
        self.key_tokens = registry.counter(names.KEY_TOKENS)
        self.queued = registry.gauge(names.QUEUED)
        self.body_bytes = registry.gauge(names.BODY_BYTES)
        self.in_flight = registry.gauge(names.IN_FLIGHT)
        self._refusals = registry.counter(names.REFUSALS)
        self._losses = registry.counter(names.ENGINE_LOSSES)
        self._resumes = registry.counter(names.RESUMES)
        self._circuits_open = registry.gauge(names.CIRCUITS_OPEN)
        self._groups = registry.gauge(names.GROUPS)
        self.state = StateGauges(registry)
        self._begun: set[str] = set()

    def engine_lost(self, model: str, kind: str) -> None:
        """Count a request that an engine failed."""
        self._losses.labels(model, kind).inc()

    def resumed(self, model: str, outcome: str) -> None:
        """Count a request that went, or could not go, to another run."""
        self._resumes.labels(model, outcome).inc()

    def refused(self, key_name: str, reason: str) -> None:
        """Count a request that a limit kept out."""
        self._refusals.labels(key_name, reason).inc()

    def show_groups(self, readiness: Mapping[str, Sequence[bool]], circuits_open: Mapping[str, int]) -> None:
        """Replace the group gauges by what holds now, each by model."""
        self._groups.clear()
        self._circuits_open.clear()
        for model in readiness.keys() - self._begun:
            self._begin(model)
        for model, ready in readiness.items():
            self._groups.labels(model, "true").set(ready.count(True))
            self._groups.labels(model, "false").set(ready.count(False))
        for model, count in circuits_open.items():
            self._circuits_open.labels(model).set(count)

    def _begin(self, model: str) -> None:
        """Let a model's rare counters begin at 0: one that began at 1 would hide its first event from every rate."""
        self._begun.add(model)
        self.requests.labels(model, "200")
        for counter in (self.prompt_tokens, self.generation_tokens, self.broken_answers, self.slow_readers):
            counter.labels(model)
        for kind in LossKind:
            self._losses.labels(model, kind)
        for outcome in RESUME_OUTCOMES:
            self._resumes.labels(model, outcome)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Everything in the format that `accept` asks for, and its content type."""
        return self.registry.exposition(accept)
