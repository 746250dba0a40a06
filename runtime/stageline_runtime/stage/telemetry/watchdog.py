"""Ends a stage that hangs: each operation that could wait for ever is announced, and a thread looks at the clock.

A hung stage can't report through its own main thread, so the watchdog writes the last words and ends the process. It
also ends a stage whose engine has gone while the stage was too busy to notice.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from stageline_api.failures import FailureClass
from stageline_runtime.ranks.exchange_times import UnfinishedExchange
from stageline_runtime.termination import RuntimeFailure

POLL_SECONDS = 0.5
ENGINE_GRACE_SECONDS = 3.0
"""How long after the engine hung up the main thread may take to end by itself (it may still hold a `Shutdown`)."""


class _Watched(NamedTuple):
    step: int
    operation: str
    peer: int | None
    since_seconds: float
    is_exchange: bool = False
    """Between the ranks of this stage; what is computed after it goes by its name too."""
    start_seconds: float | None = None
    """Part of the start, with this limit instead of a step's."""


class Watchdog:
    """One per stage. `end` is called from the watchdog's thread and must not return."""

    def __init__(
        self,
        step_timeout_seconds: float,
        engine_hung_up: Callable[[], bool],
        end: Callable[[RuntimeFailure], NoReturn],
        late_ranks: Callable[[], tuple[int, ...]] = lambda: (),
    ) -> None:
        """`late_ranks` tells which ranks of this stage have not come to the exchange that this one waits in."""
        self._timeout_seconds = step_timeout_seconds
        self._engine_hung_up = engine_hung_up
        self._end = end
        self._late_ranks = late_ranks
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

    def failure_at(self, now_seconds: float) -> RuntimeFailure | None:
        """The reason to end the stage at `now_seconds`, if there is one."""
        watched = self._watched
        if watched is not None and now_seconds - watched.since_seconds > self._limit_of(watched):
            return self._overdue(watched)
        if not self._engine_hung_up():
            self._hung_up_since = None
            return None
        if self._hung_up_since is None:
            self._hung_up_since = now_seconds
        if now_seconds - self._hung_up_since > ENGINE_GRACE_SECONDS:
            return RuntimeFailure(FailureClass.ENGINE_LOST, "the engine closed the plan bus", operation="plan bus")
        return None

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
            failure = self.failure_at(time.monotonic())
            if failure is not None:
                self._end(failure)
