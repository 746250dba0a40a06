"""The stages' timelines on one axis, the engine's clock: slices that tile a stage's time, arrows between stages. Pure.

A slice is one state of one stage; the steps of a stage lie end to end, so that the sums of its slices are its state
counters. Times are nanoseconds of the engine's monotonic clock: a stage's reading minus the offset of its clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from stageline_api.telemetry import timeline as wire
from stageline_api.telemetry.timeline import TimelineMark, TimelineStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeline:
    """What one stage told, in its own clock."""

    stage: int
    steps: tuple[TimelineStep, ...]
    open_marks: tuple[TimelineMark, ...] = ()
    """After the last step."""
    now_nanoseconds: int
    """Until when the stage told."""
    offset_nanoseconds: int = 0
    """Stage's clock minus engine's."""
    error_nanoseconds: int = 0
    """Bound on the offset's error."""
    missed_steps: int = 0
    """Steps that were overwritten before they could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of the axis that is looked at, in nanoseconds of the engine's clock."""

    begin: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One state of one stage, in nanoseconds of the engine's clock."""

    stage: int
    state: str
    operation: str
    begin: int
    end: int
    step: TimelineStep | None
    """The plan it belongs to; None for time after the last plan."""


def shown_state(piece: Slice) -> str:
    """What a slice is drawn as: compute that verified drafts as `busy.verify`."""
    if piece.step is not None and piece.step.drafts and piece.operation == wire.FORWARD:
        return f"{wire.BUSY_PREFIX}verify" if piece.state.startswith(wire.BUSY_PREFIX) else piece.state
    return piece.state


class ArrowKind(StrEnum):
    """What crossed between two stages."""

    HIDDEN = "hidden"
    FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """One tensor's way: from the start of its send to the end of its receive."""

    kind: ArrowKind
    seq: int
    """The plan that the tensor belongs to."""
    sender: int
    sent: int
    receiver: int
    received: int


def common_window(timelines: Sequence[StageTimeline]) -> Window:
    """The time that every stage reports; empty (begin = end) when there is none."""
    begin = max(_first(one) - one.offset_nanoseconds for one in timelines)
    end = min(one.now_nanoseconds - one.offset_nanoseconds for one in timelines)
    return Window(begin=begin, end=max(begin, end))


def slices(timeline: StageTimeline, window: Window) -> list[Slice]:
    """The stage's slices within the window, in time order, cut at its edges; none is empty."""
    found: list[Slice] = []
    for step, marks, end in _marked(timeline):
        for state, operation, begin, until in spans(marks, end):
            shifted_begin = max(begin - timeline.offset_nanoseconds, window.begin)
            shifted_end = min(until - timeline.offset_nanoseconds, window.end)
            if shifted_begin < shifted_end:
                found.append(
                    Slice(
                        stage=timeline.stage,
                        state=state,
                        operation=operation,
                        begin=shifted_begin,
                        end=shifted_end,
                        step=step,
                    )
                )
    return found


def spans(marks: Sequence[TimelineMark], end: int) -> Iterator[tuple[str, str, int, int]]:
    """(state, operation, begin, end) of each mark: it holds until the next one, the last until `end`."""
    ends = [*(mark.at_nanoseconds for mark in marks[1:]), end]
    for mark, until in zip(marks, ends, strict=False):
        yield mark.state, mark.operation, mark.at_nanoseconds, until


def arrows(timelines: Sequence[StageTimeline]) -> list[Arrow]:
    """Hidden tensors from each stage to the next, and feedback from the last stage to the first, by time of sending."""
    ordered = sorted(timelines, key=lambda one: one.stage)
    found = [arrow for sender, receiver in pairwise(ordered) for arrow in _hidden(sender, receiver)]
    if len(ordered) > 1:
        found += _feedback(ordered[-1], ordered[0])
    return sorted(found, key=lambda arrow: arrow.sent)


def _hidden(sender: StageTimeline, receiver: StageTimeline) -> Iterator[Arrow]:
    receives = {step.seq: end for step in receiver.steps if (end := _ended(step, wire.RECEIVE_HIDDEN)) is not None}
    for step in sender.steps:
        began = _began(step, wire.SEND_HIDDEN)
        if began is not None and step.seq in receives:
            yield _arrow(ArrowKind.HIDDEN, step.seq, sender, began, receiver, receives[step.seq])


def _feedback(last: StageTimeline, first: StageTimeline) -> Iterator[Arrow]:
    """The first plan with a `feedback_through` that reaches a plan takes its rows."""
    takers = iter(step for step in first.steps if _ended(step, wire.RECEIVE_FEEDBACK) is not None)
    taker = next(takers, None)
    # Rows taken before the first known taker can't be separated from the rows which that one took.
    unknown_through = -1 if taker is None else taker.feedback_through
    for step in last.steps:
        began = _began(step, wire.SEND_FEEDBACK)
        while taker is not None and taker.feedback_through < step.seq:
            taker = next(takers, None)
        if began is not None and taker is not None and step.seq > unknown_through:
            ended = _ended(taker, wire.RECEIVE_FEEDBACK)
            assert ended is not None
            yield _arrow(ArrowKind.FEEDBACK, step.seq, last, began, first, ended)


def _arrow(
    kind: ArrowKind, seq: int, sender: StageTimeline, sent: int, receiver: StageTimeline, received: int
) -> Arrow:
    return Arrow(
        kind=kind,
        seq=seq,
        sender=sender.stage,
        sent=sent - sender.offset_nanoseconds,
        receiver=receiver.stage,
        received=received - receiver.offset_nanoseconds,
    )


def _began(step: TimelineStep, operation: str) -> int | None:
    return next((mark.at_nanoseconds for mark in step.marks if mark.operation == operation), None)


def _ended(step: TimelineStep, operation: str) -> int | None:
    ended = [end for _, named, _, end in spans(step.marks, step.end_nanoseconds) if named == operation]
    return ended[-1] if ended else None


def _marked(timeline: StageTimeline) -> Iterator[tuple[TimelineStep | None, Sequence[TimelineMark], int]]:
    for step in timeline.steps:
        yield step, step.marks, step.end_nanoseconds
    yield None, timeline.open_marks, timeline.now_nanoseconds


def _first(timeline: StageTimeline) -> int:
    if timeline.steps:
        return timeline.steps[0].begin_nanoseconds
    return timeline.open_marks[0].at_nanoseconds if timeline.open_marks else timeline.now_nanoseconds
