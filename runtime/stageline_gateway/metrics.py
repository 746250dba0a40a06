"""The gateway's metrics, on a registry of their own, and the meter that times one request.

Only names of models that are served become label values: a client can't grow the number of series.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stageline_api.endpoints import Endpoints
from stageline_api.engine_http import Admitted, Delta, Finished
from stageline_gateway import metric_names as names
from stageline_gateway.upstream import StreamEvent


class GatewayMetrics:
    """All collectors of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = self._histogram(names.TIME_TO_FIRST_TOKEN)
        self.time_per_output_token = self._histogram(names.TIME_PER_OUTPUT_TOKEN)
        self.inter_token_latency = self._histogram(names.INTER_TOKEN_LATENCY)
        self.e2e_request_latency = self._histogram(names.E2E_REQUEST_LATENCY)
        self.requests = self._counter(names.REQUESTS)
        self.prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self.generation_tokens = self._counter(names.GENERATION_TOKENS)
        self.broken_answers = self._counter(names.BROKEN_ANSWERS)
        self.in_flight = self._gauge(names.IN_FLIGHT)
        self._losses = self._counter(names.ENGINE_LOSSES)
        self._groups = self._gauge(names.GROUPS)
        self._stale = self._gauge(names.ENDPOINTS_STALE)

    def engine_lost(self, model: str, kind: str) -> None:
        """Count a request that an engine failed."""
        self._losses.labels(model, kind).inc()

    def show_endpoints(self, endpoints: Endpoints) -> None:
        """Replace the group gauges by what the endpoints file says now."""
        self._groups.clear()
        for model in {group.model for group in endpoints.groups}:
            ready = [group.ready for group in endpoints.groups if group.model == model]
            self._groups.labels(model, "true").set(ready.count(True))
            self._groups.labels(model, "false").set(ready.count(False))

    def show_stale(self, stale: bool) -> None:
        """Say whether the endpoints file in force is an older version."""
        self._stale.set(float(stale))

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, spec: names.HistogramSpec) -> Histogram:
        return Histogram(spec.name, spec.help, ("model_name",), buckets=spec.buckets, registry=self.registry)

    def _counter(self, spec: names.MetricSpec) -> Counter:
        return Counter(spec.name, spec.help, spec.labels, registry=self.registry)

    def _gauge(self, spec: names.MetricSpec) -> Gauge:
        return Gauge(spec.name, spec.help, spec.labels, registry=self.registry)


@dataclass(slots=True)
class RequestMeter:
    """Times one request from its arrival; `see` is told every event as it is received from the engine."""

    metrics: GatewayMetrics
    model: str
    clock: Callable[[], float] = time.monotonic
    arrived: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0
    choices: int = 1
    """Choices not finished yet."""

    def see(self, event: StreamEvent, choice: int = 0) -> None:
        """Account for one event. Of several choices the first one's tokens are timed, and all are counted."""
        match event:
            case Admitted(prompt_tokens=prompt_tokens):
                self.metrics.prompt_tokens.labels(self.model).inc(prompt_tokens)
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

    def _new_tokens(self, count: int, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
            self.metrics.time_to_first_token.labels(self.model).observe(now - self.arrived)
        else:
            self.metrics.inter_token_latency.labels(self.model).observe(now - self.last_token)
        self.last_token = now
        self.tokens += count
        self.metrics.generation_tokens.labels(self.model).inc(count)

    def _finished(self, now: float) -> None:
        self.metrics.e2e_request_latency.labels(self.model).observe(now - self.arrived)
        if self.first_token is not None and self.tokens > 1:
            per_token_seconds = (self.last_token - self.first_token) / (self.tokens - 1)
            self.metrics.time_per_output_token.labels(self.model).observe(per_token_seconds)
