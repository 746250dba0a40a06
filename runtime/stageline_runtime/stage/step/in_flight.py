"""Plans that the device still works on: queued in order, finished in order, looked at without waiting.

The watchdog is always told of the oldest plan, with the operation that the device has not come past.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.plan_bus.messages import SampledRow, StepPlan
from stageline_runtime.stage.step.step_results import Sampled
from stageline_runtime.stage.telemetry.device_clock import DeviceMark, DeviceMarks, DeviceTimes
from stageline_runtime.stage.telemetry.state_clock import StateClock
from stageline_runtime.stage.telemetry.watchdog import Watchdog

POLL_SECONDS = 0.0002
"""Between two looks while the host has nothing else to do. Feedback doesn't wait for it; clients do."""


@dataclass(frozen=True, slots=True)
class _Plan:
    plan: StepPlan
    sampled: Sampled
    marks: list[DeviceMark]


class InFlight:
    """The plans between being queued and being done."""

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

    def add(self, plan: StepPlan, sampled: Sampled) -> None:
        """All of a plan's work is queued; what it sampled begins its way to the host."""
        if not isinstance(sampled, tuple):
            sampled.copy_out()
        if not self._plans:
            self._times.pending_nanoseconds = self._clock.now_nanoseconds()
        self._plans.append(_Plan(plan, sampled, self._marks.take()))
        self._watched = None
        self._watch()

    def finished(self) -> Iterator[tuple[StepPlan, tuple[SampledRow, ...]]]:
        """The plans done since the last call, oldest first; their marks are in the clock when they are given out."""
        while self._plans and self._plans[0].marks[-1].event.is_done():
            done = self._plans.popleft()
            now = self._clock.now_nanoseconds()
            for mark, at in self._times.moments(done.marks, now):
                self._clock.enter_at(mark.state, mark.operation, at)
            yield done.plan, done.sampled if isinstance(done.sampled, tuple) else done.sampled.rows()
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
