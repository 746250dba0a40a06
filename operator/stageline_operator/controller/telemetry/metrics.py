"""The operator's metrics. Passes update counters and histograms; gauges are computed at each scrape."""

from collections import Counter as Tally
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stageline_api.conditions import ConditionType
from stageline_api.failures import FailureClass
from stageline_api.resource import pipeline_model
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_api.telemetry.metric_spec import MetricKind
from stageline_api.version import stageline_version
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.model_gauges import Reading, gauges_of
from stageline_operator.controller.telemetry.startup import Cache, StartupPhase
from stageline_operator.controller.telemetry.transitions import Transition
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import recorded_status

Readings = Callable[[], Iterator[Reading]]
"""Yields gauges of other parts."""
_GAUGES = tuple(spec for spec in names.ALL_METRICS if spec.kind is MetricKind.GAUGE)


class OperatorMetrics:
    """Its own registry, so that two operators in one process (tests) do not mix."""

    def __init__(self) -> None:
        self.registry = registry = MetricRegistry()
        self.reconciles = registry.counter(names.RECONCILE_TOTAL)
        self.reconcile_errors = registry.counter(names.RECONCILE_ERRORS_TOTAL)
        self.reconcile_seconds = registry.histogram(names.RECONCILE_DURATION)
        self.corrections = registry.counter(names.RELIST_CORRECTIONS_TOTAL)
        self.api_requests = registry.counter(names.API_REQUESTS_TOTAL)
        self._failures = registry.counter(names.GROUP_FAILURES_TOTAL)
        self._restarts = registry.counter(names.GROUP_RESTARTS_TOTAL)
        self._time_to_ready = registry.histogram(names.TIME_TO_READY)
        self._startup_phase = registry.histogram(names.STARTUP_PHASE)
        self._recovery = registry.histogram(names.RECOVERY)

        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Starts and recoveries are rare: `rate()` would miss the first sample of a series that starts with it."""
        for cache in Cache:
            self._time_to_ready.labels(cache)
            for phase in StartupPhase:
                self._startup_phase.labels(phase, cache)
        for failure_class in FailureClass:
            self._recovery.labels(failure_class)

    def count_call(self, verb: str, plural: str, status: int) -> None:
        """Count a request to the API server, or a failed watch; status 0 means that no response arrived."""
        self.api_requests.labels(verb, plural, str(status)).inc()

    def count_transition(self, namespace: str, model: str, transition: Transition) -> None:
        for failure_class in transition.failures:
            self._failures.labels(namespace, model, failure_class).inc()
        for failure_class in transition.restarts:
            self._restarts.labels(namespace, model, failure_class).inc()
        for startup in transition.startups:
            self._time_to_ready.labels(startup.cache).observe(startup.seconds)
            for phase, seconds in startup.phases.items():
                self._startup_phase.labels(phase, startup.cache).observe(seconds)
        for failure_class, seconds in transition.recoveries:
            self._recovery.labels(failure_class).observe(seconds)

    def expose(self, cache: ObjectCache, readings: Readings) -> None:
        """Add the gauges, which are computed at each scrape."""
        self.registry.add(_Gauges(cache, readings))


class _Gauges(Collector):
    def __init__(self, cache: ObjectCache, readings: Readings) -> None:
        self._cache = cache
        self._readings = readings
        self._version = stageline_version()

    def collect(self) -> Iterator[Metric]:
        families = {spec: GaugeMetricFamily(spec.name, spec.help, labels=spec.labels) for spec in _GAUGES}
        for spec, labels, value in self._all_readings():
            families[spec].add_metric(list(labels), value)
        yield from families.values()

    def _all_readings(self) -> Iterator[Reading]:
        yield from self._readings()
        yield names.BUILD_INFO, (self._version,), 1
        models: Tally[str] = Tally()
        groups: Tally[tuple[str, str, str]] = Tally()
        now = datetime.now(UTC)
        for identity, manifest in self._cache.of_kind(pipeline_model.KIND):
            status = recorded_status(manifest)
            ready = (each.status for each in status.conditions if each.type == ConditionType.READY)
            models[next(ready, "Unknown")] += 1
            groups.update((identity.namespace, identity.name, group.phase) for group in status.groups)
            yield from gauges_of(manifest, status, now)
        for readiness, count in sorted(models.items()):
            yield names.MODELS, (readiness,), count
        for key, count in sorted(groups.items()):
            yield names.GROUPS, key, count
