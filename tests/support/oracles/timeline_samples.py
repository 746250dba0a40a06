"""Stage timelines written by hand, and plans to make real ones from."""

from collections.abc import Sequence

from stageline_api.telemetry.timeline import TimelineMark, TimelineStep
from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.trace.lanes import StageTimeline


def plan(seq: int, *, rows: int = 1, dummy: bool = False, feedback_posted: bool = False) -> StepPlan:
    """A decode plan of so many rows; without rows a heartbeat, unless it is a dummy."""
    return StepPlan(
        seq=seq,
        cohort=seq % 2,
        fills=(),
        rows=tuple(PlanRow(slot, 1, 7, 1, (), True) for slot in range(rows)),
        padded_tokens=max(1, rows),
        feedback_through=seq - 2,
        feedback_posted=feedback_posted,
        dummy=dummy,
    )


def step(
    seq: int,
    marks: Sequence[tuple[str, str, int]],
    end: int,
    *,
    kind: str = "decode",
    feedback_through: int = -1,
    drafts: int = 0,
    dead: bool = False,
) -> TimelineStep:
    """One step from (state, operation, moment) marks."""
    return TimelineStep(
        seq=seq,
        cohort=0,
        kind=kind,
        rows=2,
        tokens=2,
        feedback_through=feedback_through,
        marks=tuple(TimelineMark(*mark) for mark in marks),
        end_nanoseconds=end,
        drafts=drafts,
        dead=dead,
    )


def two_stages(offset_of_second: int = 0) -> list[StageTimeline]:
    """Plans 0 and 1 over two stages, in milliseconds times a million; the second stage's clock is ahead by an offset.

    Stage 0: computes 0 in 1-4, sends at 4; computes 1 in 5-8, sends at 8; waits for feedback of 0 in 8.5-10, takes it
    with plan 2, computes 2 in 10-13. Stage 1: waits for 0 until 5, computes 5-9, sends feedback at 9; computes 1 in
    10-13, sends feedback at 13; then waits for 2.
    """
    ms = 1_000_000
    first = (
        step(0, [("idle", "", 0), ("busy.decode", "forward", 1 * ms), ("wait.host", "send hidden", 4 * ms)], 5 * ms),
        step(
            1,
            [("busy.decode", "forward", 5 * ms), ("wait.host", "send hidden", 8 * ms)],
            8_500_000,
        ),
        step(
            2,
            [
                ("wait.feedback", "receive feedback", 8_500_000),
                ("busy.decode", "forward", 10 * ms),
                ("wait.host", "send hidden", 13 * ms),
            ],
            14 * ms,
            feedback_through=0,
        ),
        step(
            3,
            [("wait.feedback", "receive feedback", 14 * ms), ("busy.dummy", "forward", 15 * ms)],
            16 * ms,
            kind="dummy",
            feedback_through=1,
        ),
    )
    second = (
        step(
            0,
            [
                ("idle", "", 0),
                ("wait.recv", "receive hidden", 2 * ms),
                ("busy.decode", "forward", 5 * ms),
                ("wait.host", "send feedback", 9 * ms),
            ],
            9_500_000,
        ),
        step(
            1,
            [
                ("wait.host", "", 9_500_000),
                ("wait.recv", "receive hidden", 9_600_000),
                ("busy.decode", "forward", 10 * ms),
                ("wait.host", "send feedback", 13 * ms),
            ],
            13_500_000,
        ),
    )
    return [
        StageTimeline(stage=0, steps=first, now_nanoseconds=16 * ms),
        shifted(
            StageTimeline(
                stage=1,
                steps=second,
                open_marks=(TimelineMark("wait.recv", "receive hidden", 13_500_000),),
                now_nanoseconds=16 * ms,
            ),
            offset_of_second,
        ),
    ]


def shifted(timeline: StageTimeline, offset: int) -> StageTimeline:
    """The same as told by a clock that is ahead by `offset`."""

    def late(marks: tuple[TimelineMark, ...]) -> tuple[TimelineMark, ...]:
        return tuple(mark._replace(at_nanoseconds=mark.at_nanoseconds + offset) for mark in marks)

    return StageTimeline(
        stage=timeline.stage,
        steps=tuple(
            one.model_copy(update={"marks": late(one.marks), "end_nanoseconds": one.end_nanoseconds + offset})
            for one in timeline.steps
        ),
        open_marks=late(timeline.open_marks),
        now_nanoseconds=timeline.now_nanoseconds + offset,
        offset_nanoseconds=offset,
    )
