"""When a change of the worker's state takes effect: at once on a CPU, when the device reaches it on a GPU.

On a CPU the worker's thread computes, so `HostMarks` applies a change when it is made. On a GPU the thread only
queues work and runs ahead. So `DeviceMarks` records an event on the stream with each change and applies the change
with the time at which the device passed the event. Events of one stream pass in order, so changes are applied in
the order in which they were made. Each change closes one state and begins the next, so the states always sum to
wall time.

An event's time is derived from its distance to the previous event, since a device has a clock of its own. It is
then clamped to the host's clock: not before the event was recorded, not after it was seen to have passed. So a
drifting device clock is off by no more than that span, however long the worker lives.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, Self

Change = Callable[[int | None], None]
"""Applied with the moment in nanoseconds from which on it holds; None for now."""
POLL_SECONDS: Final = 0.02
"""How long a change may wait for the worker's next call before it is published, in case the host is stuck."""


class Marks(Protocol):
    def make(self, change: Change) -> None:
        """A change that follows all work queued so far."""


class HostMarks:
    def make(self, change: Change) -> None:
        change(None)


class DeviceEvent(Protocol):
    """The methods of torch.cuda.Event, with timing, that are used here."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Self, /) -> float:
        """Milliseconds from this one to `end_event`."""


class _Made(NamedTuple):
    event: DeviceEvent
    recorded_nanoseconds: int
    change: Change


class DeviceMarks:
    """`make` by the worker's thread; `apply_passed` by it and by the poller."""

    def __init__(
        self, new_event: Callable[[], DeviceEvent], now_nanoseconds: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._new_event = new_event
        self._now = now_nanoseconds
        self._made: deque[_Made] = deque()
        self._last: tuple[DeviceEvent, int] | None = None
        self._lock = threading.Lock()

    def make(self, change: Change) -> None:
        event = self._new_event()
        recorded = self._now()
        event.record()
        with self._lock:
            self._made.append(_Made(event, recorded, change))
            self._apply_passed()

    def apply_passed(self) -> None:
        """Apply each change if the device has passed its event."""
        with self._lock:
            self._apply_passed()

    def poll_for_ever(self) -> None:
        """Runs in a daemon thread, so that the last changes before a hang are published too."""
        while True:
            time.sleep(POLL_SECONDS)
            self.apply_passed()

    def _apply_passed(self) -> None:
        while self._made and self._made[0].event.query():
            made = self._made.popleft()
            seen = self._now()
            at = self._moment(made.event, earliest=made.recorded_nanoseconds, latest=seen)
            self._last = (made.event, at)
            made.change(at)

    def _moment(self, event: DeviceEvent, *, earliest: int, latest: int) -> int:
        if self._last is None:
            return latest
        before, at = self._last
        passed = at + round(before.elapsed_time(event) * 1e6)
        return min(max(passed, earliest, at), latest)
