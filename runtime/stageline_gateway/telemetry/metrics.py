"""The gateway's metrics, each registered from its line in `metric_names`, on a registry of their own.

Only names of served models become label values: a client can't grow the number of series. A model's metrics are
registered once and accessed by namespace, so every count names its model: `namespace` and `model_name` are always the
first labels.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Final, Generic, Self, TypeVar

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stageline_api.engine_http import Admitted, Delta, Finished
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_api.telemetry.metric_spec import MetricKind, MetricSpec
from stageline_api.version import stageline_version
from stageline_gateway.engine_client.run_events import LossKind, StreamEvent
from stageline_gateway.served_models import ServedModel
from stageline_gateway.telemetry import metric_names as names
from stageline_gateway.telemetry.quick_metrics import QuickCount, QuickCounter, QuickHistogram, QuickSeries


class _Expiry(Collector):
    """No sample while there is no certificate: a time of 0 would look like one that expired long ago."""

    def __init__(self) -> None:
        self.at: datetime | None = None

    def collect(self) -> Iterator[Metric]:
        spec = names.TLS_EXPIRY
        yield GaugeMetricFamily(spec.name, spec.help, value=None if self.at is None else self.at.timestamp())


RESUME_OUTCOMES: Final = ("resumed", "moved", "expired", "refused", "exhausted")

OneKind = TypeVar("OneKind", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class ModelCollectors:
    """The collectors of all namespaces, by name."""

    counters: Mapping[str, Counter]
    gauges: Mapping[str, Gauge]
    histograms: Mapping[str, Histogram]
    token_gaps: QuickHistogram
    tokens: QuickCounter

    @classmethod
    def registered(cls, registry: MetricRegistry) -> Self:
        """All metrics that have the label `namespace`, on `registry`."""
        of_models = [spec for spec in names.ALL_METRICS if names.NAMESPACE in spec.labels]
        specs = [spec for spec in of_models if spec not in (names.INTER_TOKEN_LATENCY, names.GENERATION_TOKENS)]
        token_gaps, tokens = QuickHistogram(names.INTER_TOKEN_LATENCY), QuickCounter(names.GENERATION_TOKENS)
        registry.add(token_gaps)
        registry.add(tokens)
        return cls(
            {spec.name: registry.counter(spec) for spec in specs if spec.kind is MetricKind.COUNTER},
            {spec.name: registry.gauge(spec) for spec in specs if spec.kind is MetricKind.GAUGE},
            {spec.name: registry.histogram(spec) for spec in specs if spec.kind is MetricKind.HISTOGRAM},
            token_gaps,
            tokens,
        )


@dataclass(frozen=True, slots=True)
class OfNamespace(Generic[OneKind]):
    """One metric of models, for a given `namespace`."""

    collector: OneKind
    namespace: str

    def labels(self, model: str, *others: str) -> OneKind:
        return self.collector.labels(self.namespace, model, *others)

    def remove(self, model: str, *others: str) -> None:
        self.collector.remove(self.namespace, model, *others)


class ModelMetrics:
    """What is counted of the models of one namespace, by their names there."""

    def __init__(self, collectors: ModelCollectors, namespace: str) -> None:
        def counter(spec: MetricSpec) -> OfNamespace[Counter]:
            return OfNamespace(collectors.counters[spec.name], namespace)

        def gauge(spec: MetricSpec) -> OfNamespace[Gauge]:
            return OfNamespace(collectors.gauges[spec.name], namespace)

        def histogram(spec: MetricSpec) -> OfNamespace[Histogram]:
            return OfNamespace(collectors.histograms[spec.name], namespace)

        self.time_to_first_token = histogram(names.TIME_TO_FIRST_TOKEN)
        self.time_per_output_token = histogram(names.TIME_PER_OUTPUT_TOKEN)
        self.queue_time = histogram(names.QUEUE_TIME)
        self.e2e_request_latency = histogram(names.E2E_REQUEST_LATENCY)
        self.requests = counter(names.REQUESTS)
        self.abandoned_after = histogram(names.ABANDONED_AFTER)
        self.prompt_tokens = counter(names.PROMPT_TOKENS)
        self.broken_answers = counter(names.BROKEN_ANSWERS)
        self.slow_readers = counter(names.SLOW_READERS)
        self.queued = gauge(names.QUEUED)
        self.in_flight = gauge(names.IN_FLIGHT)
        self.engine_losses = counter(names.ENGINE_LOSSES)
        self.resumes = counter(names.RESUMES)
        self.endpoints_stale = collectors.gauges[names.ENDPOINTS_STALE.name].labels(namespace)
        self.discovery_age = collectors.gauges[names.DISCOVERY_AGE.name].labels(namespace)
        self._circuits_open = gauge(names.CIRCUITS_OPEN)
        self._groups = gauge(names.GROUPS)
        self._collectors = collectors
        self._namespace = namespace
        self._of_models: dict[str, ServedModelMetrics] = {}
        self._begun: set[str] = set()
        self._shown: set[str] = set()

    def of_model(self, model: str) -> "ServedModelMetrics":
        """Those of one that is served: always the same for the same one."""
        if model not in self._of_models:
            self._of_models[model] = ServedModelMetrics(self, model)
        return self._of_models[model]

    def token_gaps(self, model: str) -> QuickSeries:
        return self._collectors.token_gaps.of(self._namespace, model)

    def tokens(self, model: str) -> QuickCount:
        return self._collectors.tokens.of(self._namespace, model)

    def show_groups(self, readiness: Mapping[str, Sequence[bool]], circuits_open: Mapping[str, int]) -> None:
        """Show these models, both by name, and no others."""
        for model in self._shown - readiness.keys():
            self._groups.remove(model, "true")
            self._groups.remove(model, "false")
            self._circuits_open.remove(model)
        self._shown = set(readiness)
        for model in readiness.keys() - self._begun:
            self._begin(model)
        for model, ready in readiness.items():
            self._groups.labels(model, "true").set(ready.count(True))
            self._groups.labels(model, "false").set(ready.count(False))
            self._circuits_open.labels(model).set(circuits_open[model])

    def _begin(self, model: str) -> None:
        """Let a model's rare counters begin at 0: one that began at 1 would hide its first event from every rate."""
        self._begun.add(model)
        self.requests.labels(model, "200")
        self.abandoned_after.labels(model)
        for counter in (self.prompt_tokens, self.broken_answers, self.slow_readers):
            counter.labels(model)
        self.tokens(model)
        for kind in LossKind:
            self.engine_losses.labels(model, kind)
        for outcome in RESUME_OUTCOMES:
            self.resumes.labels(model, outcome)


class ServedModelMetrics:
    """What requests of one model count on, each looked up once, when it is first needed."""

    def __init__(self, metrics: ModelMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._answered: dict[int, Counter] = {}

    @cached_property
    def time_to_first_token(self) -> Histogram:
        return self._metrics.time_to_first_token.labels(self._model)

    @cached_property
    def time_per_output_token(self) -> Histogram:
        return self._metrics.time_per_output_token.labels(self._model)

    @cached_property
    def inter_token_latency(self) -> QuickSeries:
        return self._metrics.token_gaps(self._model)

    @cached_property
    def queue_time(self) -> Histogram:
        return self._metrics.queue_time.labels(self._model)

    @cached_property
    def e2e_request_latency(self) -> Histogram:
        return self._metrics.e2e_request_latency.labels(self._model)

    @cached_property
    def prompt_tokens(self) -> Counter:
        return self._metrics.prompt_tokens.labels(self._model)

    @cached_property
    def generation_tokens(self) -> QuickCount:
        return self._metrics.tokens(self._model)

    @cached_property
    def in_flight(self) -> Gauge:
        return self._metrics.in_flight.labels(self._model)

    @cached_property
    def queued(self) -> Gauge:
        return self._metrics.queued.labels(self._model)

    def answered(self, code: int) -> None:
        """Count a request by its status."""
        if code not in self._answered:
            self._answered[code] = self._metrics.requests.labels(self._model, str(code))
        self._answered[code].inc()


class GatewayMetrics:
    """`home` is the namespace that requests for no served model are counted under."""

    def __init__(self, home: str = "") -> None:
        self._home = home
        self.registry = registry = MetricRegistry()
        self._collectors = ModelCollectors.registered(registry)
        self._of: dict[str, ModelMetrics] = {}
        self.key_tokens = QuickCounter(names.KEY_TOKENS)
        registry.add(self.key_tokens)
        self.body_bytes = registry.gauge(names.BODY_BYTES)
        self.refusals = registry.counter(names.REFUSALS)
        # What is not in use (keys, TLS) is not stale: its gauge stays 0.
        self.keys_stale = registry.gauge(names.KEYS_STALE)
        self._tls_stale = registry.gauge(names.TLS_STALE)
        self._tls_expiry = _Expiry()
        registry.add(self._tls_expiry)
        registry.gauge(names.BUILD_INFO).labels(stageline_version()).set(1)

    def of(self, namespace: str) -> ModelMetrics:
        """Those of the models of a namespace: always the same for the same one."""
        if namespace not in self._of:
            self._of[namespace] = ModelMetrics(self._collectors, namespace)
        return self._of[namespace]

    def refused(self, status: int, model: ServedModel | None) -> None:
        """Count a request that was answered with `status` before it was any model's, or for `model`."""
        namespace, name = (self._home, "") if model is None else (model.namespace, model.name)
        self._collectors.counters[names.REQUESTS.name].labels(namespace, name, str(status)).inc()

    def certificate_read(self, expires_at: datetime | None) -> None:
        self._tls_expiry.at = expires_at
        self._tls_stale.set(0)

    def certificate_stale(self) -> None:
        self._tls_stale.set(1)


@dataclass(slots=True)
class RequestMeter:
    """Times one request from its arrival. Of several choices the first one's tokens are timed, and all are counted."""

    metrics: ModelMetrics
    model: str
    clock: Callable[[], float] = time.monotonic
    """The one that `arrived` was read from."""
    arrived: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0
    """Tokens of the first choice; only these are timed."""
    all_tokens: int = 0
    """Of all choices."""
    choices: int = 1
    """Choices not finished yet."""
    trace_id: str = ""
    """Trace id of the request's span, for the inspection of slow requests; empty without a span."""
    _admitted: bool = False
    of_model: ServedModelMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.of_model = self.metrics.of_model(self.model)

    def see(self, event: StreamEvent, choice: int = 0) -> None:
        """Count an event."""
        if isinstance(event, Delta):
            self._new_tokens(len(event.token_ids), choice)
        elif isinstance(event, Admitted):
            self.of_model.prompt_tokens.inc(event.prompt_tokens)
            if not self._admitted:  # the first run ends the wait for a group
                self._admitted = True
                self.of_model.queue_time.observe(self.clock() - self.arrived)
        elif isinstance(event, Finished):
            self.choices -= 1
            if not self.choices:
                self._finished(self.clock())

    def client_left(self) -> None:
        """A client without a token yet cancelled the request, even if the answer's headers had been sent."""
        if self.first_token is None:
            self.metrics.abandoned_after.labels(self.model).observe(self.clock() - self.arrived)

    def _new_tokens(self, count: int, choice: int) -> None:
        if not count:
            return
        self.all_tokens += count
        self.of_model.generation_tokens.value += count
        if choice:
            return
        now = self.clock()
        if self.first_token is None:
            self.first_token = now
            self.of_model.time_to_first_token.observe(now - self.arrived, self._exemplar())
        else:
            self.of_model.inter_token_latency.observe(now - self.last_token)
        self.last_token = now
        self.tokens += count

    def _finished(self, now: float) -> None:
        self.of_model.e2e_request_latency.observe(now - self.arrived, self._exemplar())
        if self.first_token is not None and self.tokens > 1:
            per_token_seconds = (self.last_token - self.first_token) / (self.tokens - 1)
            self.of_model.time_per_output_token.observe(per_token_seconds)

    def _exemplar(self) -> dict[str, str] | None:
        return {"trace_id": self.trace_id} if self.trace_id else None
