"""The stage's Prometheus series. State seconds are read from the clock at scrape time, so they always sum to wall."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stageline_runtime.stage.clock import BusyKind, Idle, WaitReason
from stageline_runtime.stage.progress import StageProgress

BUSY_SECONDS: Final = "stageline_stage_busy_seconds"
WAIT_SECONDS: Final = "stageline_stage_wait_seconds"
IDLE_SECONDS: Final = "stageline_stage_idle_seconds"
WALL_SECONDS: Final = "stageline_stage_wall_seconds"
STEPS: Final = "stageline_stage_steps"
TOKENS: Final = "stageline_stage_tokens"
LAYERS: Final = "stageline_stage_layers"
MEMORY_BYTES: Final = "stageline_stage_memory_bytes"
KV_SLOTS: Final = "stageline_stage_kv_slots"


class _StageCollector(Collector):
    def __init__(self, progress: StageProgress, model_name: str) -> None:
        self._progress = progress
        self._labels = [model_name, str(progress.stage)]

    def collect(self) -> Iterator[Metric]:
        """prometheus_client: all series of this stage."""
        yield from self._state_seconds()
        progress = self._progress
        steps = self._counter(STEPS, "Plans run, by kind of compute.", ["kind"])
        tokens = self._counter(TOKENS, "Tokens run through this stage's layers, padding left out, by kind.", ["kind"])
        for kind in BusyKind:
            steps.add_metric([*self._labels, kind.value], progress.steps_by_kind.get(kind, 0))
            tokens.add_metric([*self._labels, kind.value], progress.tokens_by_kind.get(kind, 0))
        yield steps
        yield tokens
        layers = progress.layers
        yield self._gauge(LAYERS, "Layers this stage holds.", layers.count if layers else 0)
        yield self._gauge(MEMORY_BYTES, "Bytes of weights and KV cache this stage holds.", progress.memory_bytes)
        yield self._gauge(KV_SLOTS, "KV slots of this stage, one request each.", progress.num_slots)

    def _state_seconds(self) -> Iterator[Metric]:
        clock = self._progress.clock
        spent, wall = clock.reading()
        busy = self._counter(BUSY_SECONDS, "Seconds of compute of this stage, by kind of plan.", ["kind"])
        wait = self._counter(
            WAIT_SECONDS, "Seconds this stage waited while work was outstanding, by what was missing.", ["reason"]
        )
        for kind in BusyKind:
            busy.add_metric([*self._labels, kind.value], spent.get(kind, 0.0))
        for reason in WaitReason:
            wait.add_metric([*self._labels, reason.value], spent.get(reason, 0.0))
        idle = self._counter(IDLE_SECONDS, "Seconds in which no request was unfinished.", [])
        idle.add_metric(self._labels, sum(value for state, value in spent.items() if isinstance(state, Idle)))
        total = self._counter(WALL_SECONDS, "Seconds since the stage's clock began; busy + wait + idle.", [])
        total.add_metric(self._labels, wall)
        yield from (busy, wait, idle, total)

    def _counter(self, name: str, text: str, labels: list[str]) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=["model_name", "stage", *labels])

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name", "stage"])
        family.add_metric(self._labels, value)
        return family


class StageMetrics:
    """The exposition of one stage."""

    def __init__(self, progress: StageProgress, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StageCollector(progress, model_name))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)
