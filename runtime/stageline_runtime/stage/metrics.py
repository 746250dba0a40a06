"""The stage's Prometheus series. State seconds are read from the clock at scrape time, so they always sum to wall.

All is made when asked for, from what the runner's thread has counted anyway: no series costs it more than an addition.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stageline_runtime.stage.clock import BusyKind, Idle, WaitReason
from stageline_runtime.stage.progress import StageProgress

BUSY_SECONDS: Final = "stageline_stage_busy_seconds"
WAIT_SECONDS: Final = "stageline_stage_wait_seconds"
IDLE_SECONDS: Final = "stageline_stage_idle_seconds"
WALL_SECONDS: Final = "stageline_stage_wall_seconds"
STEPS: Final = "stageline_stage_steps"
GRAPH_STEPS: Final = "stageline_stage_graph_steps"
TOKENS: Final = "stageline_stage_tokens"
LAYERS: Final = "stageline_stage_layers"
MEMORY_BYTES: Final = "stageline_stage_memory_bytes"
KV_SLOTS: Final = "stageline_stage_kv_slots"
KV_TOKENS: Final = "stageline_stage_kv_tokens"
KV_CAPACITY_TOKENS: Final = "stageline_stage_kv_capacity_tokens"
STEP_SECONDS: Final = "stageline_stage_step_seconds"
P2P_BYTES: Final = "stageline_p2p_bytes"
BUBBLE_RATIO: Final = "stageline_stage_bubble_ratio"
BUBBLE_WINDOW_SECONDS: Final = 15


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
        captured = self._counter(GRAPH_STEPS, "Plans run, by how much of them ran captured.", ["graph"])
        for mode, count in progress.steps_by_graph_mode.items():
            captured.add_metric([*self._labels, mode.value], count)
        yield captured
        yield self._step_seconds()
        yield self._bytes_sent()
        yield from self._bubble()
        layers = progress.layers
        yield self._gauge(LAYERS, "Layers this stage holds.", layers.count if layers else 0)
        yield self._gauge(MEMORY_BYTES, "Bytes of weights and KV cache this stage holds.", progress.memory_bytes)
        yield self._gauge(KV_SLOTS, "KV slots of this stage, one request each.", progress.num_slots)
        held = "Tokens in this stage's KV slots, an ended request's until its slot is given out again."
        yield self._gauge(KV_TOKENS, held, progress.occupancy.tokens)
        capacity = progress.num_slots * progress.slot_tokens
        yield self._gauge(KV_CAPACITY_TOKENS, "Tokens that this stage's KV slots can hold.", capacity)

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

    def _step_seconds(self) -> Metric:
        text = (
            "Seconds of compute of one plan on this stage (layers; on the last stage also sampling), by kind. "
            "Waiting and transfer are left out: they are the same for all stages, compute is not."
        )
        steps = HistogramMetricFamily(STEP_SECONDS, text, labels=["model_name", "stage", "kind"])
        for kind, counts in self._progress.step_seconds_by_kind.items():
            buckets, value_sum = counts.cumulative()
            steps.add_metric([*self._labels, kind.value], buckets, value_sum)
        return steps

    def _bytes_sent(self) -> Metric:
        text = "Bytes sent to another stage: hidden tensors to the next, padding included; feedback to the first."
        sent = self._counter(P2P_BYTES, text, ["tensor"])
        sent.add_metric([*self._labels, "hidden"], self._progress.hidden_bytes_sent)
        sent.add_metric([*self._labels, "feedback"], self._progress.feedback_bytes_sent)
        return sent

    def _bubble(self) -> Iterator[Metric]:
        """No sample while nothing was outstanding in the window: a ratio of nothing is not 0."""
        now = self._progress.clock.now_nanoseconds()
        ratio = self._progress.timeline.bubble_ratio(now - BUBBLE_WINDOW_SECONDS * 10**9, now)
        text = (
            f"(wait + dummy) / (busy + wait) of this stage over the last {BUBBLE_WINDOW_SECONDS} s, or over the plans "
            "its timeline holds where those are fewer; dummy is part of busy, idle time counts as neither. 0 to 1."
        )
        if ratio is not None:
            yield self._gauge(BUBBLE_RATIO, text, ratio)

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
