"""Calls into the grammar library under a limit of CPU time: one that passes it is left behind, and nobody waits for it.

Nothing can stop such a call, but most hold no lock of the interpreter. So each is made in a thread of its own, which is
left to end by itself when the call takes too long; the next call gets a new thread. Handing a call over takes some 25
microseconds.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

_LEAST_WAIT_SECONDS: Final = 0.001

T = TypeVar("T")


class OverrunError(Exception):
    """The call took longer than it may, and what it was made on must not be used again."""


@dataclass(frozen=True, slots=True)
class Made(Generic[T]):
    """A call's result and the CPU time that it took, in seconds."""

    result: T
    seconds: float


class WatchedCalls:
    """Makes calls one after the other; used from one thread at a time."""

    def __init__(self) -> None:
        self._caller: _Caller | None = None
        self.num_left = 0
        """Calls that were left behind."""
        self.cpu_seconds = 0.0
        """What all calls took while they were waited for."""

    def make(self, call: Callable[[], T], limit_seconds: float) -> Made[T]:
        """Raises OverrunError, or what `call` raises."""
        caller = self._caller = self._caller or _Caller()
        results: SimpleQueue[Made[T] | BaseException] = SimpleQueue()
        before = caller.cpu_seconds()
        caller.calls.put(lambda: results.put(_made(call)))
        made = _in_time(results, lambda: caller.cpu_seconds() - before, limit_seconds)
        self.cpu_seconds += caller.cpu_seconds() - before
        if made is None:
            self._caller = None
            self.num_left += 1
            caller.leave()
            raise OverrunError
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        if self._caller is not None:
            self._caller.calls.put(None)
            self._caller = None


class _Caller:
    """One thread, until it is left."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_take_calls, args=(self.calls,), name="masks", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def cpu_seconds(self) -> float:
        return time.clock_gettime(self._clock)

    def leave(self) -> None:
        """Let it end after the call under way."""
        # At its priority: one that others outrank would hold the interpreter's lock for long at its end.
        self.calls.put(None)


def _take_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()


def _made(call: Callable[[], T]) -> Made[T] | BaseException:
    began = time.thread_time()
    try:
        result = call()
    except BaseException as error:
        return error
    return Made(result, time.thread_time() - began)


def _in_time(results: SimpleQueue[T], used_seconds: Callable[[], float], limit_seconds: float) -> T | None:
    """The result; None once more CPU time was used. A thread that gets no CPU is waited for."""
    wait = limit_seconds
    while True:
        try:
            return results.get(timeout=max(wait, _LEAST_WAIT_SECONDS))
        except Empty:
            wait = limit_seconds - used_seconds()
            if wait < 0:
                return None
