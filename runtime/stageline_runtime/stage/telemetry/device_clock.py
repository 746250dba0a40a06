"""When the device did what: marks that the runner makes become events, and later moments of the host's clock.

The runner queues work faster than the device does it, so its own moments say nothing. An event is recorded at each
mark; once a plan is done, the device's clock tells how far apart they lie. The host saw the plan's end between the last
look that found it pending and now, and that interval holds the two clocks together however far they drift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stageline_runtime.accelerator.protocol import Event, Stream
from stageline_runtime.stage.telemetry.state_clock import State
from stageline_runtime.stage.telemetry.watchdog import Watchdog


class DeviceMark(NamedTuple):
    """The device enters a state when it comes to `event`."""

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
        """The device enters `state` here."""
        self._marks.append(DeviceMark(state, operation, None, self._stream.record(timed=True)))

    def watch(self, step: int, operation: str, peer: int | None) -> None:
        """The host begins an operation, which may block it."""
        self._watchdog.watch(step, operation, peer)
        if self._marks and self._marks[-1].operation == operation:
            self._marks[-1] = self._marks[-1]._replace(peer=peer)

    def rest(self) -> None:
        """The host has queued a plan; what the device has of it is watched by whoever holds it."""

    def take(self) -> list[DeviceMark]:
        """The marks since the last call."""
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
