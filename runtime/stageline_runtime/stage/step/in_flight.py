"""Plans that a device still works on: queued in order, finished in order, polled without waiting.

The runner queues work faster than the device does it, so host times don't show what the device does. At each change of
state the runner records an event instead. Once a plan is done, the device's clock gives the times between its events.
The host saw the plan's end between the last poll that found it pending and now. That interval keeps the two clocks
together despite drift. The watchdog always gets the oldest plan, with the operation that the device has not passed. A
draft model's steps after a plan are a separate entry in flight, right behind it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stageline_runtime.accelerator.protocol import Accelerator, Event, Stream
from stageline_runtime.plan_bus.messages import Drafted, SampledRow, StepPlan
from stageline_runtime.stage.step.pending_drafts import PendingDrafts
from stageline_runtime.stage.step.pending_rows import PendingRows
from stageline_runtime.stage.telemetry.state_clock import State, StateClock
from stageline_runtime.stage.telemetry.watchdog import Watchdog


class DeviceMark(NamedTuple):
    """The device enters a state when it reaches `event`."""

    state: State
    operation: str
    peer: int | None
    event: Event


class DeviceMarks:
    """Takes the runner's marks in place of the state clock, and tells the watchdog what the host itself does."""

    def __init__(self, stream: Stream, watchdog: Watchdog) -> None:
        self._stream = stream
        self._watchdog = watchdog
        self._marks: list[DeviceMark] = []

    def enter(self, state: State, operation: str = "") -> None:
        self._marks.append(DeviceMark(state, operation, None, self._stream.record(timed=True)))

    def watch(self, step: int, operation: str, peer: int | None) -> None:
        """The host begins an operation, which may block it."""
        self._watchdog.watch(step, operation, peer)
        if self._marks and self._marks[-1].operation == operation:
            self._marks[-1] = self._marks[-1]._replace(peer=peer)

    def rest(self) -> None:
        """The host has queued a plan; `InFlight` watches what the device does of it."""

    def take(self) -> list[DeviceMark]:
        taken, self._marks = self._marks, []
        return taken


@dataclass(slots=True)
class DeviceTimes:
    """Moments of events on the host's clock, in nanoseconds."""

    anchor: Event
    anchor_nanoseconds: int
    pending_nanoseconds: int
    """The host's last look that found the next plan not done."""

    def moments(self, marks: list[DeviceMark], now_nanoseconds: int) -> Iterator[tuple[DeviceMark, int]]:
        """Each mark of a plan that is done, with its moment; the last mark becomes the new anchor."""
        last = marks[-1].event
        end = self.anchor_nanoseconds + round(last.seconds_since(self.anchor) * 1e9)
        end = min(max(end, self.pending_nanoseconds), now_nanoseconds)
        for mark in marks:
            yield mark, end - round(last.seconds_since(mark.event) * 1e9)
        self.anchor, self.anchor_nanoseconds = last, end


POLL_SECONDS = 0.0002
"""Poll interval while the host is idle. Feedback doesn't wait for it; clients do."""


def look_until(look: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Look at the device from time to time; not at all where it is over before."""
    while not is_over():
        look()
        if not is_over():
            time.sleep(POLL_SECONDS)


class FinishedPlan(NamedTuple):
    plan: StepPlan
    rows: tuple[SampledRow, ...]
    drafted: Drafted | None = None
    """The drafts after a plan that was returned separately before."""


@dataclass(frozen=True, slots=True)
class _Plan:
    plan: StepPlan
    sampled: PendingRows
    marks: list[DeviceMark]
    drafts: PendingDrafts | None = None

    def finished(self) -> FinishedPlan:
        return FinishedPlan(self.plan, self.sampled.rows(), None if self.drafts is None else self.drafts.drafted())


class InFlight:
    def __init__(self, accelerator: Accelerator, clock: StateClock, watchdog: Watchdog, marks: DeviceMarks) -> None:
        self._clock = clock
        self._watchdog = watchdog
        self._marks = marks
        self._plans: deque[_Plan] = deque()
        anchor = accelerator.main.record(timed=True)
        anchor.wait()
        now = clock.now_nanoseconds()
        self._times = DeviceTimes(anchor, now, now)
        self._watched: tuple[int, str] | None = None

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def oldest_seq(self) -> int:
        """Of the plan that the device is at; there must be one."""
        return self._plans[0].plan.seq

    def add(self, plan: StepPlan, sampled: PendingRows) -> None:
        """All of a plan's work is queued; what it sampled begins its way to the host."""
        sampled.copy_out()
        self._append(_Plan(plan, sampled, self._marks.take()))

    def add_drafts(self, plan: StepPlan, sampled: PendingRows, drafts: PendingDrafts) -> None:
        """All draft steps of the plan that was added last are queued; what they drew begins its way to the host."""
        drafts.copy_out()
        self._append(_Plan(plan, sampled, self._marks.take(), drafts))

    def _append(self, added: _Plan) -> None:
        if not self._plans:
            self._times.pending_nanoseconds = self._clock.now_nanoseconds()
        self._plans.append(added)
        self._watched = None
        self._watch()

    def finished(self) -> Iterator[FinishedPlan]:
        """Plans and drafts finished since the last call, oldest first. The marks of each are in the clock when it is
        yielded."""
        while self._plans and self._plans[0].marks[-1].event.is_done():
            done = self._plans.popleft()
            now = self._clock.now_nanoseconds()
            for mark, at in self._times.moments(done.marks, now):
                self._clock.enter_at(mark.state, mark.operation, at)
            yield done.finished()
        self._times.pending_nanoseconds = self._clock.now_nanoseconds()
        self._watch()

    def _watch(self) -> None:
        if not self._plans:
            self._watched = None
            self._watchdog.rest()
            return
        oldest = self._plans[0]
        reached = [mark for mark in oldest.marks[:-1] if mark.event.is_done()]
        mark = reached[-1] if reached else oldest.marks[0]
        operation = mark.operation or "earlier work"
        if self._watched != (oldest.plan.seq, operation):
            self._watched = (oldest.plan.seq, operation)
            self._watchdog.watch(oldest.plan.seq, operation, mark.peer)
