"""Ends a stage that hangs: each operation that could wait forever is announced, and a thread checks the clock.

A hung stage can't report through its main thread, so the watchdog writes the termination message and ends the process.
It also ends a stage that was too busy to notice that its engine is gone.

Time in which this process waited for a CPU doesn't count: on a busy machine a step may take many times as long. While
such a step continues, the stage reports to the engine that it computes. The engine forwards this to the stages that
wait for this one.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from stageline_api.failures import FailureClass
from stageline_runtime.ranks.exchange_times import UnfinishedExchange
from stageline_runtime.stage.telemetry.cpu_waits import CpuWaits
from stageline_runtime.termination import RuntimeFailure

POLL_SECONDS = 0.5
TELLS_A_LIMIT = 4
"""How often others are notified within the limit of a step."""
ENGINE_GRACE_SECONDS = 3.0
"""How long the main thread may take to end after the engine closed the connection (it may still hold a `Shutdown`)."""


class _Watched(NamedTuple):
    step: int
    operation: str
    peer: int | None
    since_seconds: float
    is_exchange: bool = False
    """Between the ranks of this stage; computation after it uses its name too."""
    start_seconds: float | None = None
    """Part of the start, with this limit instead of a step's."""


@dataclass(slots=True)
class _Slow:
    """An operation that was under way at two polls."""

    watched: _Watched
    looked_seconds: float
    told_seconds: float
    starved_seconds: float = 0.0


class Watchdog:
    """One per stage. `end` is called from the watchdog's thread and must not return."""

    def __init__(
        self,
        step_timeout_seconds: float,
        engine_hung_up: Callable[[], bool],
        end: Callable[[RuntimeFailure], NoReturn],
        late_ranks: Callable[[], tuple[int, ...]] = lambda: (),
        tell_computing: Callable[[int], None] = lambda _step: None,
        peer_computed_at: Callable[[], float] = lambda: float("-inf"),
        cpu_waits: CpuWaits | None = None,
    ) -> None:
        """`late_ranks` returns the ranks of this stage that have not reached the exchange that this one waits in.
        `tell_computing` reports that a step continues here, `peer_computed_at` when another stage last reported that.
        """
        self._timeout_seconds = step_timeout_seconds
        self._engine_hung_up = engine_hung_up
        self._end = end
        self._late_ranks = late_ranks
        self._tell_computing = tell_computing
        self._peer_computed_at = peer_computed_at
        self._cpu_waits = cpu_waits or CpuWaits()
        self._slow: _Slow | None = None
        self.unfinished: Callable[[], UnfinishedExchange | None] = lambda: None
        """On a device: the exchange between this stage's ranks that it has not come past; asked when time is up."""
        self._watched: _Watched | None = None
        self._hung_up_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, step: int, operation: str, peer: int | None) -> None:
        """An operation begins; it replaces the one before."""
        self._watched = _Watched(step, operation, peer, time.monotonic())

    def watch_start(self, operation: str, limit_seconds: float) -> None:
        """An operation of the start begins, of class RendezvousTimeout where it takes longer than `limit_seconds`."""
        self._watched = _Watched(0, operation, None, time.monotonic(), start_seconds=limit_seconds)

    def exchange(self, operation: str) -> None:
        """An exchange between this stage's ranks begins, within the step that is being watched."""
        step = 0 if self._watched is None else self._watched.step
        self._watched = _Watched(step, operation, None, time.monotonic(), is_exchange=True)

    def rest(self) -> None:
        """Nothing that could hang is under way."""
        self._watched = None

    def look(self, now_seconds: float) -> None:
        """Count how long the current operation had no CPU, and report that it continues; called at every poll."""
        watched, slow = self._watched, self._slow
        if watched is None or (slow is not None and slow.watched is not watched):
            self._slow = slow = None
        if watched is None:
            return
        if slow is None:  # of most operations no poll sees more, so nothing is read for them
            self._slow = _Slow(watched, now_seconds, now_seconds)
            return
        starved_seconds = min(self._cpu_waits.look(), now_seconds - slow.looked_seconds)
        # Waiting for another rank takes turns on the CPU too: what it lacked of those held nothing up.
        if not (watched.is_exchange and self._late_ranks()):
            slow.starved_seconds += starved_seconds
        slow.looked_seconds = now_seconds
        is_own = watched.peer is None and not watched.is_exchange and watched.start_seconds is None
        if is_own and now_seconds - slow.told_seconds >= self._timeout_seconds / TELLS_A_LIMIT:
            slow.told_seconds = now_seconds
            self._tell_computing(watched.step)

    def failure_at(self, now_seconds: float) -> RuntimeFailure | None:
        """The reason to end the stage at `now_seconds`, if there is one."""
        watched = self._watched
        if watched is not None and self._is_overdue(watched, now_seconds):
            return self._overdue(watched)
        if not self._engine_hung_up():
            self._hung_up_since = None
            return None
        if self._hung_up_since is None:
            self._hung_up_since = now_seconds
        if now_seconds - self._hung_up_since > ENGINE_GRACE_SECONDS:
            return RuntimeFailure(FailureClass.ENGINE_LOST, "the engine closed the plan bus", operation="plan bus")
        return None

    def _is_overdue(self, watched: _Watched, now_seconds: float) -> bool:
        slow, limit = self._slow, self._limit_of(watched)
        starved_seconds = slow.starved_seconds if slow is not None and slow.watched is watched else 0.0
        if now_seconds - watched.since_seconds - starved_seconds <= limit:
            return False
        waits_for_others = watched.peer is not None or watched.is_exchange
        return not waits_for_others or now_seconds - self._peer_computed_at() > limit

    def _limit_of(self, watched: _Watched) -> float:
        return self._timeout_seconds if watched.start_seconds is None else watched.start_seconds

    def _overdue(self, watched: _Watched) -> RuntimeFailure:
        late = self._late_ranks() if watched.is_exchange else ()
        operation, peer = watched.operation, watched.peer
        unfinished = self.unfinished()
        if unfinished is not None and (unfinished.late or peer is None):
            operation, late, peer = unfinished.operation, unfinished.late, None
        elif watched.is_exchange and not late:
            operation = f"computing after {operation}"
        towards = f" (without rank {', '.join(map(str, late))})" if late else ""
        towards = towards if peer is None else f" (stage {peer})"
        is_start = watched.start_seconds is not None
        when = "" if is_start else f"plan {watched.step}: "
        return RuntimeFailure(
            FailureClass.RENDEZVOUS_TIMEOUT if is_start else FailureClass.STEP_TIMEOUT,
            f"{when}{operation}{towards} took longer than {self._limit_of(watched):g} s",
            operation=operation,
            step=None if is_start else watched.step,
            peer=peer,
            rank=late[0] if late else None,
        )

    def _run(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            now_seconds = time.monotonic()
            self.look(now_seconds)
            failure = self.failure_at(now_seconds)
            if failure is not None:
                self._end(failure)
