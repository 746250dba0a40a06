"""The stage's state clock: always in exactly one state, so that the states' seconds sum to wall time. Pure.

Written by the runner's thread at each change of state and read by the metrics thread at any moment; a reading adds the
state that is running now up to the moment of reading. A listener hears of each change with the very reading of the
clock that the counters are made from.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class BusyKind(StrEnum):
    """What a busy stage computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    DUMMY = "dummy"


class WaitReason(StrEnum):
    """What a waiting stage lacks."""

    RECV = "recv"
    SEND = "send"
    FEEDBACK = "feedback"
    HOST = "host"
    STARVED = "starved"


@dataclass(frozen=True, slots=True)
class Idle:
    """No request is unfinished anywhere; never part of the bubble."""


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
        """The state now."""
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
        """The clock that all marks are read from."""
        return self._now()

    def reading(self) -> tuple[dict[State, float], float]:
        """Seconds by state (the running one included) and wall seconds, taken at one instant."""
        with self._lock:
            now = self._now()
            spent = dict(self._spent)
            spent[self._state] = spent.get(self._state, 0) + now - self._since
        return {state: nanoseconds / 1e9 for state, nanoseconds in spent.items()}, (now - self._started) / 1e9
