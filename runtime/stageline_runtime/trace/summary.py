"""What the stages did with a window of time: seconds by state, and how well the pipeline was kept busy. Pure.

The measures are those of the metrics: bubble ratio = (wait + dummy) / (busy + wait), dummy being part of busy. It is
read beside the bottleneck share and the imbalance, because a lower ratio can mean lower throughput.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stageline_api.telemetry.timeline import BUSY_PREFIX, IDLE_STATE, WAIT_PREFIX
from stageline_runtime.trace.lanes import Slice, StageTimeline, Window, slices

DUMMY = "dummy"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSeconds:
    """What one stage did with a stretch of time, in seconds by state."""

    busy: dict[str, float]
    """By kind."""
    wait: dict[str, float]
    """By reason."""
    idle: float
    """No request was unfinished anywhere: part of no ratio."""

    @property
    def busy_seconds(self) -> float:
        """Compute, dummy plans included."""
        return sum(self.busy.values())

    @property
    def wait_seconds(self) -> float:
        """Waiting while work was outstanding."""
        return sum(self.wait.values())

    @property
    def active_seconds(self) -> float:
        """Time in which work was outstanding."""
        return self.busy_seconds + self.wait_seconds


def bubble_ratio(stages: Sequence[StateSeconds]) -> float | None:
    """(wait + dummy) / (busy + wait) over all `stages`; None when no work was outstanding."""
    lost = sum(one.wait_seconds + one.busy.get(DUMMY, 0.0) for one in stages)
    return _ratio(lost, sum(one.active_seconds for one in stages))


def bottleneck_share(stages: Sequence[StateSeconds]) -> float | None:
    """Busy time of the busiest stage over the time in which work was outstanding; None when there was none."""
    return _ratio(max(one.busy_seconds for one in stages), max(one.active_seconds for one in stages))


def imbalance(stages: Sequence[StateSeconds]) -> float | None:
    """Busy time of the busiest stage over the mean of the stages; 1 is perfect balance. None when none was busy."""
    busy = [one.busy_seconds for one in stages]
    return _ratio(max(busy) * len(busy), sum(busy))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary(StateSeconds):
    stage: int
    steps: int
    """Plans that computed something and ended in the window."""

    @property
    def bubble_ratio(self) -> float | None:
        return bubble_ratio([self])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    stages: tuple[StageSummary, ...]

    @property
    def bubble_ratio(self) -> float | None:
        return bubble_ratio(self.stages)

    @property
    def bottleneck(self) -> StageSummary:
        return max(self.stages, key=lambda one: one.busy_seconds)

    @property
    def bottleneck_share(self) -> float | None:
        return bottleneck_share(self.stages)

    @property
    def imbalance(self) -> float | None:
        return imbalance(self.stages)


def summarize(timelines: Sequence[StageTimeline], window: Window) -> GroupSummary:
    ordered = sorted(timelines, key=lambda one: one.stage)
    return GroupSummary(stages=tuple(_stage_summary(one, window) for one in ordered))


def _stage_summary(timeline: StageTimeline, window: Window) -> StageSummary:
    spent = _seconds_by_state(slices(timeline, window))
    return StageSummary(
        stage=timeline.stage,
        steps=sum(
            bool(step.kind) and window.begin < step.end_nanoseconds - timeline.offset_nanoseconds <= window.end
            for step in timeline.steps
        ),
        busy=_with_prefix(spent, BUSY_PREFIX),
        wait=_with_prefix(spent, WAIT_PREFIX),
        idle=spent.get(IDLE_STATE, 0.0),
    )


def _seconds_by_state(pieces: Iterable[Slice]) -> dict[str, float]:
    spent: dict[str, int] = {}
    for piece in pieces:
        spent[piece.state] = spent.get(piece.state, 0) + piece.end - piece.begin
    return {state: nanoseconds / 1e9 for state, nanoseconds in spent.items()}


def _with_prefix(spent: dict[str, float], prefix: str) -> dict[str, float]:
    return {state.removeprefix(prefix): seconds for state, seconds in spent.items() if state.startswith(prefix)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def summary_lines(summary: GroupSummary, window: Window) -> list[str]:
    """A table of milliseconds by stage and state, and a line about the pipeline; only states that occurred."""
    kinds = _names(one.busy for one in summary.stages)
    reasons = _names(one.wait for one in summary.stages)
    header = ["stage", "plans", "busy", *kinds, "wait", *reasons, "idle", "bubble"]
    rows = [header, *(_row(one, kinds, reasons) for one in summary.stages)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"milliseconds of {window.seconds:.3f} s in which every stage was watched")
    if summary.bubble_ratio is None or summary.bottleneck_share is None or summary.imbalance is None:
        lines.append("no request was unfinished in this time")
    else:
        lines.append(
            f"bubble {summary.bubble_ratio:.1%}; the busiest is stage {summary.bottleneck.stage}, "
            f"busy {summary.bottleneck_share:.1%} of the time with work outstanding; imbalance {summary.imbalance:.2f}"
        )
    return lines


def _row(one: StageSummary, kinds: Sequence[str], reasons: Sequence[str]) -> list[str]:
    bubble = "-" if one.bubble_ratio is None else f"{one.bubble_ratio:.1%}"
    busy = [_milliseconds(one.busy_seconds), *(_milliseconds(one.busy.get(kind, 0.0)) for kind in kinds)]
    wait = [_milliseconds(one.wait_seconds), *(_milliseconds(one.wait.get(reason, 0.0)) for reason in reasons)]
    return [str(one.stage), str(one.steps), *busy, *wait, _milliseconds(one.idle), bubble]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _names(tables: Iterable[dict[str, float]]) -> list[str]:
    return sorted({name for table in tables for name, seconds in table.items() if seconds > 0})
