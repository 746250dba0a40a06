"""The gateway's metrics, each registered from its line in `metric_names`, on a registry of their own.

Only names of models that are served become label values: a client can't grow the number of series.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stageline_api.engine_http import Admitted, Delta, Finished
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_gateway.engine_client.generation import LossKind, StreamEvent
from stageline_gateway.telemetry import metric_names as names


class _Expiry(Collector):
    """No sample while there is no certificate: a time of 0 would look like one that expired long ago."""

    def __init__(self) -> None:
        self.at: datetime | None = None

    def collect(self) -> Iterator[Metric]:
        spec = names.TLS_EXPIRY
        yield GaugeMetricFamily(spec.name, spec.help, value=None if self.at is None else self.at.timestamp())


RESUME_OUTCOMES: Final = ("resumed", "moved", "expired", "refused", "exhausted")


class GatewayMetrics:
    def __init__(self) -> None:
        self.registry = registry = MetricRegistry()
        self.time_to_first_token = registry.histogram(names.TIME_TO_FIRST_TOKEN)
        self.time_per_output_token = registry.histogram(names.TIME_PER_OUTPUT_TOKEN)
        self.inter_token_latency = registry.histogram(names.INTER_TOKEN_LATENCY)
        self.queue_time = registry.histogram(names.QUEUE_TIME)
        self.e2e_request_latency = registry.histogram(names.E2E_REQUEST_LATENCY)
        self.requests = registry.counter(names.REQUESTS)
        self.abandoned_after = registry.histogram(names.ABANDONED_AFTER)
        self.prompt_tokens = registry.counter(names.PROMPT_TOKENS)
        self.generation_tokens = registry.counter(names.GENERATION_TOKENS)
        self.broken_answers = registry.counter(names.BROKEN_ANSWERS)
        self.slow_readers = registry.counter(names.SLOW_READERS)
        self.key_tokens = registry.counter(names.KEY_TOKENS)
        self.queued = registry.gauge(names.QUEUED)
        self.body_bytes = registry.gauge(names.BODY_BYTES)
        self.in_flight = registry.gauge(names.IN_FLIGHT)
        self.refusals = registry.counter(names.REFUSALS)
        self.engine_losses = registry.counter(names.ENGINE_LOSSES)
        self.resumes = registry.counter(names.RESUMES)
        self._circuits_open = registry.gauge(names.CIRCUITS_OPEN)
        self._groups = registry.gauge(names.GROUPS)
        # What is not in use (keys, TLS) is not stale: its gauge stays 0.
        self.keys_stale = registry.gauge(names.KEYS_STALE)
        self.endpoints_stale = registry.gauge(names.ENDPOINTS_STALE)
        self.discovery_age = registry.gauge(names.DISCOVERY_AGE)
        self._tls_stale = registry.gauge(names.TLS_STALE)
        self._tls_expiry = _Expiry()
        registry.add(self._tls_expiry)
        registry.gauge(names.BUILD_INFO).labels(version("stageline")).set(1)
        self._begun: set[str] = set()

    def show_groups(self, readiness: Mapping[str, Sequence[bool]], circuits_open: Mapping[str, int]) -> None:
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
        self.abandoned_after.labels(model)
        for counter in (self.prompt_tokens, self.generation_tokens, self.broken_answers, self.slow_readers):
            counter.labels(model)
        for kind in LossKind:
            self.engine_losses.labels(model, kind)
        for outcome in RESUME_OUTCOMES:
            self.resumes.labels(model, outcome)

    def certificate_read(self, expires_at: datetime | None) -> None:
        self._tls_expiry.at = expires_at
        self._tls_stale.set(0)

    def certificate_stale(self) -> None:
        self._tls_stale.set(1)


@dataclass(slots=True)
class RequestMeter:
    """Times one request from its arrival. Of several choices the first one's tokens are timed, and all are counted."""

    metrics: GatewayMetrics
    model: str
    clock: Callable[[], float] = time.monotonic
    arrived: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0
    """Of the first choice, whose tokens are timed."""
    all_tokens: int = 0
    """Of all choices."""
    choices: int = 1
    """Choices not finished yet."""
    trace_id: str = ""
    """Of the request's span, for whoever looks at a slow one; empty where none is kept."""
    _admitted: bool = False

    def see(self, event: StreamEvent, choice: int = 0) -> None:
        if isinstance(event, Delta):
            self.all_tokens += len(event.token_ids)
        match event:
            case Admitted(prompt_tokens=prompt_tokens):
                self.metrics.prompt_tokens.labels(self.model).inc(prompt_tokens)
                if not self._admitted:  # the first run ends the wait for a group
                    self._admitted = True
                    self.metrics.queue_time.labels(self.model).observe(self.clock() - self.arrived)
            case Delta(token_ids=token_ids) if choice:
                self.metrics.generation_tokens.labels(self.model).inc(len(token_ids))
            case Delta(token_ids=token_ids) if token_ids:
                self._new_tokens(len(token_ids), self.clock())
            case Finished():
                self.choices -= 1
                if not self.choices:
                    self._finished(self.clock())
            case _:
                pass

    def client_left(self) -> None:
        """Who had no token yet gave the request up, however far the answer's headers had come."""
        if self.first_token is None:
            self.metrics.abandoned_after.labels(self.model).observe(self.clock() - self.arrived)

    def _new_tokens(self, count: int, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
            self.metrics.time_to_first_token.labels(self.model).observe(now - self.arrived, self._exemplar())
        else:
            self.metrics.inter_token_latency.labels(self.model).observe(now - self.last_token)
        self.last_token = now
        self.tokens += count
        self.metrics.generation_tokens.labels(self.model).inc(count)

    def _finished(self, now: float) -> None:
        self.metrics.e2e_request_latency.labels(self.model).observe(now - self.arrived, self._exemplar())
        if self.first_token is not None and self.tokens > 1:
            per_token_seconds = (self.last_token - self.first_token) / (self.tokens - 1)
            self.metrics.time_per_output_token.labels(self.model).observe(per_token_seconds)

    def _exemplar(self) -> dict[str, str] | None:
        return {"trace_id": self.trace_id} if self.trace_id else None
