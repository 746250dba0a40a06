"""A stage's state clock from its metrics, and the figures between two readings. Pure.

Idle seconds (no unfinished request anywhere) are excluded from every figure except wall: a window is the time between
two readings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from stageline_runtime import metric_names as names
from stageline_runtime.stage.telemetry.state_clock import WaitReason
from stageline_runtime.trace.summary import StateSeconds, bottleneck_share, bubble_ratio, imbalance


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds(StateSeconds):
    """Seconds by state, and steps, of one stage: since its start, or in a window."""

    wall: float
    steps: float

    def since(self, before: "StageSeconds") -> "StageSeconds":
        """The difference since `before`."""
        return StageSeconds(
            busy={kind: seconds - before.busy.get(kind, 0.0) for kind, seconds in self.busy.items()},
            wait={reason: seconds - before.wait.get(reason, 0.0) for reason, seconds in self.wait.items()},
            idle=self.idle - before.idle,
            wall=self.wall - before.wall,
            steps=self.steps - before.steps,
        )


def parse_stage_seconds(exposition: str) -> StageSeconds:
    """One stage's metrics page as `StageSeconds`."""
    by_name: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            label = sample.labels.get("kind") or sample.labels.get("reason") or ""
            by_name.setdefault(family.name, {})[label] = sample.value
    return StageSeconds(
        busy=by_name[names.STAGE_BUSY.family],
        wait=by_name[names.STAGE_WAIT.family],
        idle=by_name[names.STAGE_IDLE.family][""],
        wall=by_name[names.STAGE_WALL.family][""],
        steps=sum(by_name[names.STAGE_STEPS.family].values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFigures:
    """How busy a pipeline was in a window."""

    bubble_ratio: float
    """(wait + dummy) / (busy + wait), over all stages."""
    bottleneck_share: float
    """Busy seconds of the busiest stage / the window."""
    imbalance: float
    """Busy seconds of the busiest stage / the mean over the stages."""
    host_seconds_per_step: float
    """Per step, the seconds in which inputs were available and compute had not started; the largest over the stages."""
    clock_error: float
    """The largest |busy + wait + idle - wall| / wall over the stages; 0 if states cover the time exactly."""


def pipeline_figures(windows: Sequence[StageSeconds]) -> PipelineFigures:
    """Figures of one window, measured on every stage. Each stage's window must contain some work."""
    ratios = bubble_ratio(windows), bottleneck_share(windows), imbalance(windows)
    bubble, share, balance = (ratio for ratio in ratios if ratio is not None)
    return PipelineFigures(
        bubble_ratio=bubble,
        bottleneck_share=share,
        imbalance=balance,
        host_seconds_per_step=max(window.wait.get(WaitReason.HOST, 0.0) / window.steps for window in windows),
        clock_error=max(abs(one.active_seconds + one.idle - one.wall) / one.wall for one in windows),
    )
