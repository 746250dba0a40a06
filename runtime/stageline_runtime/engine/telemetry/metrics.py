"""The engine's Prometheus series: of its requests, its scheduler and its plans.

Each is registered from its line in `metric_names`; `model_name` is a label of all.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from stageline_api.engine_http import FinishReason
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_api.telemetry.metric_spec import MetricSpec
from stageline_api.version import stageline_version
from stageline_runtime import metric_names as names
from stageline_runtime.engine.scheduling.cache_sizing import CacheSize
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.plan_bus.messages import StepPlan
from stageline_runtime.speculation.settings import DraftCounts

GROUP_LOST = "group_lost"
GUIDE = "guide"
REFUSED = "refused"


class EngineMetrics:
    """Series of one engine, on a registry of their own. Used on the engine's event loop."""

    def __init__(self, model_name: str) -> None:
        self.registry = MetricRegistry()
        self._model_name = model_name
        self.requests = RequestMetrics(self.registry, model_name)
        self._gauges = _OccupancyGauges(self.registry, model_name)
        self._drafts = _DraftCounters(self.registry, model_name)
        self._plans = self._counter(names.PLANS)
        self._preemptions = self._counter(names.PREEMPTIONS)
        self._preemptions_counted = 0
        self._rows = self.registry.histogram(names.COHORT_ROWS).labels(model_name)
        self._tokens = self.registry.histogram(names.ITERATION_TOKENS).labels(model_name)
        self.feedback_latency = self.registry.histogram(names.FEEDBACK_LATENCY).labels(model_name)
        self._p2p_latency = self.registry.histogram(names.P2P_LATENCY)
        self._kv_room = self.registry.gauge(names.KV_ROOM)
        self.registry.gauge(names.ENGINE_BUILD_INFO).labels(model_name, stageline_version()).set(1)

    def cache_sized(self, size: CacheSize) -> None:
        """The stages have reported how much memory they have."""
        for stage, tokens in enumerate(size.room_tokens):
            self._kv_room.labels(self._model_name, str(stage)).set(tokens)

    def planned(self, plan: StepPlan, preemptions: int) -> None:
        """A plan with rows was made; `preemptions` is the total since the start."""
        self._plans.inc()
        self._rows.observe(len(plan.rows))
        self._tokens.observe(sum(row.num_tokens for row in plan.rows))
        if preemptions != self._preemptions_counted:
            self._preemptions.inc(preemptions - self._preemptions_counted)
            self._preemptions_counted = preemptions

    def p2p_latency(self, receiving_stage: int) -> Histogram:
        return self._p2p_latency.labels(self._model_name, str(receiving_stage))

    def counted_elsewhere(self, steps: int, preemptions: int) -> None:
        """Another engine's scheduler has made `steps` steps and `preemptions` preemptions since the last call."""
        self._plans.inc(steps)
        self._preemptions.inc(preemptions)

    def page(
        self, occupancy: "Occupancy | None", accept: str = "", drafts: DraftCounts | None = None
    ) -> tuple[bytes, str]:
        """All series and their content type, with gauges of `occupancy`, which is None until the group is complete.

        `drafts` has the total draft counts since the start, with speculative decoding.
        """
        if occupancy is not None:
            self._gauges.show(occupancy)
        if drafts is not None:
            self._drafts.read(drafts)
        return self.registry.exposition(accept)

    def _counter(self, spec: MetricSpec) -> Counter:
        return self.registry.counter(spec).labels(self._model_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """The resources that requests hold at one moment, for every scheduler."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache, 0 to 1."""
    kv_blocks: Mapping[str, int]
    """By state; they sum to the cache's size."""
    plans_in_flight: int = 0
    cohort_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Occupancy":
        ledger = scheduler.ledger
        free = ledger.num_blocks - ledger.held_blocks - ledger.cached_blocks
        return cls(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_usage=ledger.held_blocks / ledger.num_blocks,
            kv_blocks={"held": ledger.held_blocks, "cached": ledger.cached_blocks, "free": free},
            plans_in_flight=scheduler.num_plans_in_flight,
            cohort_sizes=scheduler.cohort_sizes(),
        )


class _OccupancyGauges:
    def __init__(self, registry: MetricRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._running = registry.gauge(names.NUM_REQUESTS_RUNNING).labels(model_name)
        self._waiting = registry.gauge(names.NUM_REQUESTS_WAITING).labels(model_name)
        self._kv_usage = registry.gauge(names.KV_CACHE_USAGE).labels(model_name)
        self._kv_blocks = registry.gauge(names.KV_BLOCKS)
        self._plans_in_flight = registry.gauge(names.PLANS_IN_FLIGHT).labels(model_name)
        self._cohorts = registry.gauge(names.COHORT_REQUESTS)

    def show(self, occupancy: Occupancy) -> None:
        self._running.set(occupancy.running)
        self._waiting.set(occupancy.waiting)
        self._plans_in_flight.set(occupancy.plans_in_flight)
        self._kv_usage.set(occupancy.kv_usage)
        for state, count in occupancy.kv_blocks.items():
            self._kv_blocks.labels(self._model_name, state).set(count)
        for cohort, size in enumerate(occupancy.cohort_sizes):
            self._cohorts.labels(self._model_name, str(cohort)).set(size)


class _DraftCounters:
    def __init__(self, registry: MetricRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._drafted = registry.counter(names.DRAFT_TOKENS).labels(model_name)
        self._held = registry.counter(names.ACCEPTED_TOKENS).labels(model_name)
        self._rows = registry.counter(names.DRAFTED_ROWS).labels(model_name)
        self._held_at = registry.counter(names.ACCEPTED_AT)
        self._counted = DraftCounts()

    def read(self, counts: DraftCounts) -> None:
        """Add the increase since the last call."""
        before, self._counted = self._counted, deepcopy(counts)
        self._drafted.inc(counts.drafted - before.drafted)
        self._held.inc(counts.held - before.held)
        self._rows.inc(counts.rows - before.rows)
        for place, held in enumerate(counts.held_at):
            earlier = before.held_at[place] if place < len(before.held_at) else 0
            self._held_at.labels(self._model_name, str(place)).inc(held - earlier)


@dataclass(slots=True)
class RequestTimes:
    """Moments of one request, in seconds."""

    arrived: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    tokens: int = 0


class RequestMetrics:
    """What is counted and timed of requests: vLLM's names and definitions, on the monotonic clock.

    A request that another engine began, or that lost its slot, is timed from its first row here; its tokens are those
    sampled here.
    """

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
        self._failures = {reason: failures.labels(model_name, reason) for reason in (GROUP_LOST, GUIDE, REFUSED)}
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
        return RequestTimes(self._now())

    def refused(self, code: str) -> None:
        self._refusals.labels(self._model_name, code).inc()

    def longest_wait_seconds(self, all_times: Iterable[RequestTimes]) -> float:
        """Of all open requests, how long the one waits that came first of those without a row."""
        now = self._now()
        return max((now - times.arrived for times in all_times if not times.scheduled), default=0.0)

    def show_waiting(self, seconds: float) -> None:
        self._oldest.set(seconds)

    def looked_up(self, num_tokens: int, num_cached: int) -> None:
        self._cache_queries.inc(num_tokens)
        self._cache_hits.inc(num_cached)

    def scheduled(self, times: RequestTimes, prompt_tokens: int) -> None:
        times.scheduled = self._now()
        self._queue.observe(times.scheduled - times.arrived)
        self._prompt_lengths.observe(prompt_tokens)
        self._prompt_tokens.inc(prompt_tokens)

    def sampled(self, times: RequestTimes | None) -> None:
        """A token was sampled; `times` is None if its client has left."""
        self._generation_tokens.inc()
        if times is None:
            return
        times.tokens += 1
        times.last_token = self._now()
        if times.tokens == 1:
            times.first_token = times.last_token
            self._prefill.observe(times.first_token - times.scheduled)

    def ended(self, times: RequestTimes, reason: FinishReason) -> None:
        self._ends[reason].inc()
        if reason is FinishReason.ABORT or not times.tokens:
            return
        self._decode.observe(times.last_token - times.first_token)
        self._inference.observe(times.last_token - times.scheduled)
        self._output_lengths.observe(times.tokens)

    def failed(self, reason: str) -> None:
        self._failures[reason].inc()
