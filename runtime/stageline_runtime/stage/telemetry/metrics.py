"""The stage's Prometheus series. State seconds are read from the clock at scrape time, so they always sum to wall.

All is made when asked for, from what the runner's thread has counted anyway: no series costs it more than an addition.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stageline_api.health import Phase
from stageline_api.telemetry.metric_registry import MetricRegistry
from stageline_api.telemetry.metric_spec import MetricKind, MetricSpec
from stageline_api.version import stageline_version
from stageline_runtime import metric_names as names
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.state_clock import BusyKind, Idle, WaitReason

BUBBLE_WINDOW_SECONDS: Final = 15

_Counted = TypeVar("_Counted", bound=StrEnum)
Samples = Iterable[tuple[str, float]]
"""(value of the metric's own label, value of the sample)."""


class StageFamilies:
    """Families of counters and gauges of one stage; their `labels` (model name and stage) come first."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = tuple(labels)

    def single(self, spec: MetricSpec, value: float) -> Metric:
        """Of one series."""
        family = _family(spec)
        family.add_metric(self._labels, value)
        return family

    def by_label(self, spec: MetricSpec, samples: Samples) -> Metric:
        """Of a series for each value of the metric's own label."""
        family = _family(spec)
        for label, value in samples:
            family.add_metric([*self._labels, label], value)
        return family


def _family(spec: MetricSpec) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
    return kind(spec.family, spec.help, labels=spec.labels)


class _StageCollector(Collector):
    def __init__(self, progress: StageProgress, model_name: str) -> None:
        self._progress = progress
        self._labels = [model_name, str(progress.stage)]
        self._families = StageFamilies(self._labels)
        self._version = stageline_version()

    def collect(self) -> Iterator[Metric]:
        yield from self._state_seconds()
        yield from self._steps()
        yield from self._bubble()
        yield from self._holdings()
        if not self._progress.is_rank:  # of all ranks these are the supervisor's to tell
            phase = self._progress.phase
            yield self._families.by_label(names.STAGE_PHASE, ((one.value, float(one is phase)) for one in Phase))
            yield self._families.single(names.STAGE_MEMORY, self._progress.memory_bytes)
        started = self._progress.startup_seconds.items()
        yield self._families.by_label(names.STAGE_STARTUP, ((one.value, seconds) for one, seconds in started))
        yield self._families.by_label(names.STAGE_BUILD_INFO, [(self._version, 1)])

    def _state_seconds(self) -> Iterator[Metric]:
        spent, wall = self._progress.clock.reading()
        yield self._families.by_label(names.STAGE_BUSY, ((kind.value, spent.get(kind, 0.0)) for kind in BusyKind))
        yield self._families.by_label(
            names.STAGE_WAIT, ((reason.value, spent.get(reason, 0.0)) for reason in WaitReason)
        )
        idle = sum(value for state, value in spent.items() if isinstance(state, Idle))
        yield self._families.single(names.STAGE_IDLE, idle)
        yield self._families.single(names.STAGE_WALL, wall)

    def _steps(self) -> Iterator[Metric]:
        progress = self._progress
        yield self._families.by_label(names.STAGE_STEPS, _by_value(progress.steps_by_kind))
        yield self._families.by_label(names.STAGE_TOKENS, _by_value(progress.tokens_by_kind))
        yield self._families.by_label(names.STAGE_GRAPH_STEPS, _by_value(progress.steps_by_graph_mode))
        spec = names.STAGE_STEP
        steps = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        for kind, counts in progress.step_seconds_by_kind.items():
            buckets, value_sum = counts.cumulative()
            steps.add_metric([*self._labels, kind.value], buckets, value_sum)
        yield steps
        sent = [("hidden", progress.hidden_bytes_sent), ("feedback", progress.feedback_bytes_sent)]
        yield self._families.by_label(names.P2P_BYTES, sent)

    def _bubble(self) -> Iterator[Metric]:
        """No sample while nothing was outstanding in the window: a ratio of nothing is not 0."""
        now = self._progress.clock.now_nanoseconds()
        ratio = self._progress.timeline.bubble_ratio(now - BUBBLE_WINDOW_SECONDS * 10**9, now)
        if ratio is not None:
            yield self._families.single(names.STAGE_BUBBLE, ratio)

    def _holdings(self) -> Iterator[Metric]:
        progress = self._progress
        yield self._families.single(names.STAGE_LAYERS, progress.layers.count if progress.layers else 0)
        yield self._families.single(names.STAGE_KV_SLOTS, progress.num_slots)
        yield self._families.single(names.STAGE_KV_TOKENS, progress.occupancy.tokens)
        yield self._families.single(names.STAGE_KV_CAPACITY, progress.kv_capacity_tokens)
        yield self._families.single(names.STAGE_INCARNATION, progress.incarnation)
        yield self._families.single(names.STAGE_LACKS_KERNELS, progress.lacks_native_kernels)


def _by_value(counts: Mapping[_Counted, int]) -> Samples:
    return [(one.value, count) for one, count in counts.items()]


class StageMetrics:
    def __init__(self, progress: StageProgress, model_name: str) -> None:
        self._registry = MetricRegistry()
        self._registry.add(_StageCollector(progress, model_name))

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Everything in the format that the header `accept` asks for, and its content type."""
        return self._registry.exposition(accept)
