"""Runs foreign code (a model's chat template) with a deadline, in a thread that can be stopped.

Python can't end a thread from outside, but it can raise an exception in one at its next bytecode, which is enough for
a loop written in Jinja. The thread is made for the one call, so an exception that comes late hits nothing else.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TimeLimitExceededError(Exception):
    """The code ran longer than it may."""


class _Stop(SystemExit):
    # A SystemExit: no `except Exception` of the code swallows it, and should it come just after the code has ended,
    # the thread ends by it without a traceback.
    pass


def run_with_time_limit(function: Callable[[], T], limit_seconds: float) -> T:
    """Call `function` in a thread of its own and return its result or raise its exception.

    Raises:
        TimeLimitExceededError: it did not end within `limit_seconds`; it is stopped at its next bytecode.
    """
    call = _Call(function)
    thread = threading.Thread(target=call.run, name="time-limited", daemon=True)
    thread.start()
    thread.join(limit_seconds)
    if thread.is_alive():
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
        raise TimeLimitExceededError(f"took longer than {limit_seconds:g} s")
    return call.result()


class _Call(Generic[T]):
    """A call whose outcome crosses from one thread to another."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._values: list[T] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._values.append(self._function())
        except _Stop:
            return
        except Exception as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]
