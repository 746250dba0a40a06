"""What is counted and timed of requests at the engine: vLLM's names and definitions, on the monotonic clock.

A request that another engine began, or that lost its slot, is timed from its first row here; its tokens are those
sampled here.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stageline_api.engine_http import FinishReason
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_runtime import metric_names as names

GROUP_LOST = "group_lost"
GUIDE = "guide"


@dataclass(slots=True)
class RequestTimes:
    """Moments of one request, in seconds."""

    arrived: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    tokens: int = 0


class RequestMetrics:
    """Series of one engine's requests."""

    def __init__(
        self, registry: MetricRegistry, model_name: str, now_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now_seconds
        self._model_name = model_name
        self._add_histograms(registry, model_name)
        self._prompt_tokens = registry.counter(names.PROMPT_TOKENS).labels(model_name)
        self._generation_tokens = registry.counter(names.GENERATION_TOKENS).labels(model_name)
        self._cache_queries = registry.counter(names.PREFIX_CACHE_QUERIES).labels(model_name)
        self._cache_hits = registry.counter(names.PREFIX_CACHE_HITS).labels(model_name)
        success = registry.counter(names.REQUEST_SUCCESS)
        self._ends = {reason: success.labels(model_name, reason.value) for reason in FinishReason}
        failures = registry.counter(names.REQUEST_FAILURES)
        self._failures = {reason: failures.labels(model_name, reason) for reason in (GROUP_LOST, GUIDE)}
        self._refusals = registry.counter(names.REFUSALS)
        self._oldest = registry.gauge(names.OLDEST_WAITING).labels(model_name)

    def _add_histograms(self, registry: MetricRegistry, model_name: str) -> None:
        self._queue = registry.histogram(names.REQUEST_QUEUE_TIME).labels(model_name)
        self._prefill = registry.histogram(names.REQUEST_PREFILL_TIME).labels(model_name)
        self._decode = registry.histogram(names.REQUEST_DECODE_TIME).labels(model_name)
        self._inference = registry.histogram(names.REQUEST_INFERENCE_TIME).labels(model_name)
        self._prompt_lengths = registry.histogram(names.REQUEST_PROMPT_TOKENS).labels(model_name)
        self._output_lengths = registry.histogram(names.REQUEST_GENERATION_TOKENS).labels(model_name)

    def arrived(self) -> RequestTimes:
        """A request has come."""
        return RequestTimes(self._now())

    def refused(self, code: str) -> None:
        """A request was not taken."""
        self._refusals.labels(self._model_name, code).inc()

    def show_waiting(self, all_times: Iterable[RequestTimes]) -> None:
        """Of all open requests, how long the one waits that came first of those without a row."""
        now = self._now()
        self._oldest.set(max((now - times.arrived for times in all_times if not times.scheduled), default=0.0))

    def looked_up(self, num_tokens: int, num_cached: int) -> None:
        """Tokens to compute were looked for in the cache."""
        self._cache_queries.inc(num_tokens)
        self._cache_hits.inc(num_cached)

    def scheduled(self, times: RequestTimes, prompt_tokens: int) -> None:
        """A request's first row was planned."""
        times.scheduled = self._now()
        self._queue.observe(times.scheduled - times.arrived)
        self._prompt_lengths.observe(prompt_tokens)
        self._prompt_tokens.inc(prompt_tokens)

    def sampled(self, times: RequestTimes | None) -> None:
        """A token came; `times` None when nobody waits for it any more."""
        self._generation_tokens.inc()
        if times is None:
            return
        times.tokens += 1
        times.last_token = self._now()
        if times.tokens == 1:
            times.first_token = times.last_token
            self._prefill.observe(times.first_token - times.scheduled)

    def ended(self, times: RequestTimes, reason: FinishReason) -> None:
        """A request has ended as it should, or its sender left."""
        self._ends[reason].inc()
        if reason is FinishReason.ABORT or not times.tokens:
            return
        self._decode.observe(times.last_token - times.first_token)
        self._inference.observe(times.last_token - times.scheduled)
        self._output_lengths.observe(times.tokens)

    def failed(self, reason: str) -> None:
        """A request can't be finished."""
        self._failures[reason].inc()
