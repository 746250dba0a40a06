"""The stage's account of its time: seconds in each state since it began, and the state changes of its last steps.

`StateClock` is always in exactly one state, so the states' seconds sum to wall time. The runner's thread tells it of
each change; the metrics thread reads it at any moment, the running state included up to that moment. `Timeline` hears
of each change with the very reading of the clock that the seconds are made from, and keeps a ring of finished steps.

The timeline is written without locks: a mark is an append, the end of a step replaces one ring entry by a finished
tuple. Readers take a copy of the ring in one bytecode and so see whole steps, old or new. A step begins where the one
before it ended, so the steps' states tile the stage's time.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from stageline_api.telemetry import timeline as wire
from stageline_runtime.plan_bus.messages import PlanMoments, StepPlan, StepTimes


class BusyKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    DRAFT = "draft"
    """The draft model's steps, after a plan of any kind."""
    DUMMY = "dummy"


class WaitReason(StrEnum):
    RECV = "recv"
    SEND = "send"
    FEEDBACK = "feedback"
    HOST = "host"
    STARVED = "starved"


@dataclass(frozen=True, slots=True)
class Idle:
    """No request is unfinished anywhere in the group; never part of the bubble."""


State = BusyKind | WaitReason | Idle
IDLE = Idle()
Listener = Callable[[State, str, int], None]
"""Told the state entered, the operation that it is for, and the moment in nanoseconds."""


class StateClock:
    """Seconds spent in each state since the clock was made."""

    def __init__(
        self,
        now_nanoseconds: Callable[[], int] = time.perf_counter_ns,
        listener: Listener = lambda _state, _operation, _now: None,
    ) -> None:
        self._now = now_nanoseconds
        self._listener = listener
        self._started = self._since = now_nanoseconds()
        self._state: State = IDLE
        self._spent: dict[State, int] = {}
        self._lock = threading.Lock()
        listener(IDLE, "", self._started)

    @property
    def state(self) -> State:
        return self._state

    def enter(self, state: State, operation: str = "") -> None:
        """Close the running state and begin `state` at the same instant; `operation` is for the listener."""
        with self._lock:
            now = self._now()
            self._spent[self._state] = self._spent.get(self._state, 0) + now - self._since
            self._state = state
            self._since = now
        self._listener(state, operation, now)

    def enter_at(self, state: State, operation: str, at_nanoseconds: int) -> None:
        """`enter` for a change learned of later; one from before the last change counts from that on."""
        with self._lock:
            at = max(at_nanoseconds, self._since)
            self._spent[self._state] = self._spent.get(self._state, 0) + at - self._since
            self._state = state
            self._since = at
        self._listener(state, operation, at)

    def now_nanoseconds(self) -> int:
        return self._now()

    def reading(self) -> tuple[dict[State, float], float]:
        """Seconds by state (the running one included) and wall seconds, taken at one instant."""
        with self._lock:
            now = self._now()
            spent = dict(self._spent)
            spent[self._state] = spent.get(self._state, 0) + now - self._since
        return {state: nanoseconds / 1e9 for state, nanoseconds in spent.items()}, (now - self._started) / 1e9


RING_STEPS: Final = 4096
PAGE_STEPS: Final = 256
"""Steps of one answer. Encoding one holds the interpreter for about a millisecond, which the runner has to wait."""
MAX_MARKS: Final = 64
"""Marks kept of one step. A stage that changes state more often without a plan forgets the oldest."""
RECENT_STEPS: Final = 32
"""Number of steps with times that are sent to the engine with each clock comparison."""


Mark = tuple[State, str, int]
"""State, operation, and the moment in nanoseconds from which on they hold. A plain tuple: made at each change."""


class StepRecord(NamedTuple):
    """One finished plan on this stage. Numbers only: a plan kept here would keep its prompts alive."""

    seq: int
    cohort: int
    kind: BusyKind | None
    """None for a heartbeat."""
    rows: int
    tokens: int
    feedback_through: int
    marks: tuple[Mark, ...]
    end_nanoseconds: int
    drafts: int = 0

    def busy_nanoseconds(self) -> int:
        """How long the plan itself was computed."""
        total = 0
        since, computing = 0, False
        for state, _, at in self.marks:
            if computing:
                total += at - since
            since, computing = at, isinstance(state, BusyKind) and state is not BusyKind.DRAFT
        return total + (self.end_nanoseconds - since if computing else 0)

    def draft_nanoseconds(self) -> int:
        """How long it drafted, once the plan itself was done."""
        ends = [mark[2] for mark in self.marks[1:]] + [self.end_nanoseconds]
        spans = zip(self.marks, ends, strict=True)
        return sum(end - at for (state, _, at), end in spans if state is BusyKind.DRAFT)

    def times(self) -> StepTimes:
        """When the plan's input was there, and how long it was waited for and computed."""
        ends = [mark[2] for mark in self.marks[1:]] + [self.end_nanoseconds]
        ready = self.marks[0][2] if self.marks else self.end_nanoseconds
        waited = 0
        for (state, operation, at), end in zip(self.marks, ends, strict=True):
            if operation in (wire.RECEIVE_HIDDEN, wire.RECEIVE_FEEDBACK):
                waited += end - at
            elif state not in (IDLE, WaitReason.STARVED):
                continue
            # Between two plans the stage rested, or it waited for this one's input: its step begins after that.
            ready = end
        kind = "" if self.kind is None else self.kind.value
        return StepTimes(self.seq, kind, ready, self.end_nanoseconds, self.busy_nanoseconds(), waited)


class Timeline:
    """The ring of one stage, and the marks of the step under way."""

    def __init__(self, ring_steps: int = RING_STEPS) -> None:
        self._ring: list[StepRecord | None] = [None] * ring_steps
        self._count = 0
        self._marks: list[Mark] = []

    def mark(self, state: State, operation: str, at_nanoseconds: int) -> None:
        """The stage entered `state`; a repetition says nothing new."""
        marks = self._marks
        if marks:
            last = marks[-1]
            if last[0] is state and last[1] == operation:
                return
            if len(marks) >= MAX_MARKS:
                del marks[0]
        marks.append((state, operation, at_nanoseconds))

    def end_step(self, plan: StepPlan, kind: BusyKind | None) -> StepRecord:
        """A plan is done: its record ends at the last mark, with which the next one begins."""
        marks = self._marks
        last = marks[-1]
        record = StepRecord(
            plan.seq,
            plan.cohort,
            kind,
            len(plan.rows),
            plan.num_tokens,
            plan.feedback_through,
            tuple(marks[:-1]),
            last[2],
            sum(row.num_drafts for row in plan.rows),
        )
        self._marks = [last]
        self._ring[self._count % len(self._ring)] = record
        self._count += 1
        return record

    def records(self) -> list[StepRecord]:
        """The steps kept, oldest first. For any thread."""
        kept = [record for record in self._ring[:] if record is not None]
        kept.sort(key=lambda record: record.seq)
        return kept

    def page(self, since_seq: int, *, stage: int, stage_count: int, incarnation: int, now: int) -> wire.TimelinePage:
        """The first `PAGE_STEPS` steps after plan `since_seq`, as they are sent. For any thread."""
        open_marks = self._marks[:]  # before the records: a step that ends in between is sent twice, never lost
        kept = self.records()
        newer = [record for record in kept if record.seq > since_seq]
        if kept:
            open_marks = [mark for mark in open_marks if mark[2] >= kept[-1].end_nanoseconds]
        return wire.TimelinePage(
            stage=stage,
            stage_count=stage_count,
            incarnation=incarnation,
            oldest_seq=kept[0].seq if kept else None,
            more=len(newer) > PAGE_STEPS,
            steps=tuple(_wire_step(record) for record in newer[:PAGE_STEPS]),
            open_marks=tuple(map(_wire_mark, open_marks)),
            now_nanoseconds=now,
        )

    def seconds_since(self, begin_nanoseconds: int, now_nanoseconds: int) -> dict[State, float]:
        """Seconds in each state after `begin_nanoseconds`, as far back as the ring reaches. For any thread."""
        spent: dict[State, int] = {}
        open_marks, end = self._marks[:], now_nanoseconds
        for marks in (open_marks, *(record.marks for record in reversed(self.records()))):
            for state, _, at in reversed(marks):
                if at < end:
                    spent[state] = spent.get(state, 0) + end - max(at, begin_nanoseconds)
                    end = at
                if at <= begin_nanoseconds:
                    return {state: value / 1e9 for state, value in spent.items()}
        return {state: value / 1e9 for state, value in spent.items()}

    def bubble_ratio(self, begin_nanoseconds: int, now_nanoseconds: int) -> float | None:
        """(wait + dummy) / (busy + wait) after `begin_nanoseconds`; None when no work was outstanding."""
        spent = self.seconds_since(begin_nanoseconds, now_nanoseconds)
        active = sum(seconds for state, seconds in spent.items() if not isinstance(state, Idle))
        useful = sum(spent.get(kind, 0.0) for kind in BusyKind if kind is not BusyKind.DUMMY)
        return (active - useful) / active if active > 0 else None

    def recent_moments(self) -> tuple[PlanMoments, ...]:
        """When the newest plans were received and sent, for the engine's view of the links. For the runner's thread."""
        size, count = len(self._ring), self._count
        newest = (self._ring[index % size] for index in range(max(0, count - min(RECENT_STEPS, size)), count))
        return tuple(moments_of(record) for record in newest if record is not None and record.kind is not None)


def state_name(state: State) -> str:
    match state:
        case BusyKind():
            return wire.BUSY_PREFIX + state.value
        case WaitReason():
            return wire.WAIT_PREFIX + state.value
        case Idle():
            return wire.IDLE_STATE


def _wire_mark(mark: Mark) -> wire.TimelineMark:
    state, operation, at_nanoseconds = mark
    return wire.TimelineMark(state_name(state), operation, at_nanoseconds)


def _wire_step(record: StepRecord) -> wire.TimelineStep:
    return wire.TimelineStep(
        seq=record.seq,
        cohort=record.cohort,
        kind="" if record.kind is None else record.kind.value,
        rows=record.rows,
        tokens=record.tokens,
        feedback_through=record.feedback_through,
        marks=tuple(map(_wire_mark, record.marks)),
        end_nanoseconds=record.end_nanoseconds,
        drafts=record.drafts,
    )


def moments_of(record: StepRecord) -> PlanMoments:
    """When one step crossed the stage's links."""
    begun: dict[str, int] = {}
    ended: dict[str, int] = {}
    ends = [mark[2] for mark in record.marks[1:]] + [record.end_nanoseconds]
    for (_, operation, at), end in zip(record.marks, ends, strict=True):
        begun.setdefault(operation, at)
        ended[operation] = end
    return PlanMoments(
        seq=record.seq,
        feedback_through=record.feedback_through,
        receive_began=begun.get(wire.RECEIVE_HIDDEN),
        received=ended.get(wire.RECEIVE_HIDDEN),
        send_began=begun.get(wire.SEND_HIDDEN),
        feedback_send_began=begun.get(wire.SEND_FEEDBACK),
        feedback_received=ended.get(wire.RECEIVE_FEEDBACK),
    )
