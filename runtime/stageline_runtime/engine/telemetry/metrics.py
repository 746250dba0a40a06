"""The engine's Prometheus series, each registered from its line in `metric_names`; `model_name` is a label of all."""

from importlib.metadata import version

from prometheus_client import Counter, Histogram

from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_api.telemetry.metric_spec import MetricSpec
from stageline_runtime import metric_names as names
from stageline_runtime.engine.scheduling.cache_sizing import CacheSize
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.telemetry.request_metrics import RequestMetrics
from stageline_runtime.plan_bus.messages import StepPlan


class EngineMetrics:
    """Series of one engine, on a registry of their own. Used on the engine's event loop."""

    def __init__(self, model_name: str) -> None:
        self.registry = MetricRegistry()
        self._model_name = model_name
        self.requests = RequestMetrics(self.registry, model_name)
        self._gauges = _SchedulerGauges(self.registry, model_name)
        self._plans = self._counter(names.PLANS)
        self._preemptions = self._counter(names.PREEMPTIONS)
        self._preemptions_counted = 0
        self._rows = self.registry.histogram(names.COHORT_ROWS).labels(model_name)
        self._tokens = self.registry.histogram(names.ITERATION_TOKENS).labels(model_name)
        self.feedback_latency = self.registry.histogram(names.FEEDBACK_LATENCY).labels(model_name)
        self._p2p_latency = self.registry.histogram(names.P2P_LATENCY)
        self._kv_room = self.registry.gauge(names.KV_ROOM)
        self.registry.gauge(names.ENGINE_BUILD_INFO).labels(model_name, version("stageline")).set(1)

    def cache_sized(self, size: CacheSize) -> None:
        """The stages have said how much memory they have."""
        for stage, tokens in enumerate(size.room_tokens):
            self._kv_room.labels(self._model_name, str(stage)).set(tokens)

    def planned(self, plan: StepPlan, preemptions: int) -> None:
        """A plan with rows was made; `preemptions` is their number since the beginning."""
        self._plans.inc()
        self._rows.observe(len(plan.rows))
        self._tokens.observe(sum(row.num_tokens for row in plan.rows))
        self._preemptions.inc(preemptions - self._preemptions_counted)
        self._preemptions_counted = preemptions

    def p2p_latency(self, receiving_stage: int) -> Histogram:
        """The transfers to one stage."""
        return self._p2p_latency.labels(self._model_name, str(receiving_stage))

    def page(self, scheduler: Scheduler | None, accept: str = "") -> tuple[bytes, str]:
        """All series and their content type, gauges read from `scheduler`, which is None until the group stands."""
        if scheduler is not None:
            self._gauges.read(scheduler)
        return self.registry.exposition(accept)

    def _counter(self, spec: MetricSpec) -> Counter:
        return self.registry.counter(spec).labels(self._model_name)


class _SchedulerGauges:
    def __init__(self, registry: MetricRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._running = registry.gauge(names.NUM_REQUESTS_RUNNING).labels(model_name)
        self._waiting = registry.gauge(names.NUM_REQUESTS_WAITING).labels(model_name)
        self._kv_usage = registry.gauge(names.KV_CACHE_USAGE).labels(model_name)
        self._kv_blocks = registry.gauge(names.KV_BLOCKS)
        self._plans_in_flight = registry.gauge(names.PLANS_IN_FLIGHT).labels(model_name)
        self._cohorts = registry.gauge(names.COHORT_REQUESTS)

    def read(self, scheduler: Scheduler) -> None:
        ledger = scheduler.ledger
        self._running.set(scheduler.num_running)
        self._waiting.set(scheduler.num_waiting)
        self._plans_in_flight.set(scheduler.num_plans_in_flight)
        self._kv_usage.set(ledger.held_blocks / ledger.num_blocks)
        free = ledger.num_blocks - ledger.held_blocks - ledger.cached_blocks
        for state, count in {"held": ledger.held_blocks, "cached": ledger.cached_blocks, "free": free}.items():
            self._kv_blocks.labels(self._model_name, state).set(count)
        for cohort, size in enumerate(scheduler.cohort_sizes()):
            self._cohorts.labels(self._model_name, str(cohort)).set(size)
