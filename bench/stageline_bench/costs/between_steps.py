"""The activity between two measured steps, which decides most of a step's cost.

Code that ran a moment ago is in the core's caches. In a group, layers run for 20 ms between two steps, and so do other
processes on the machine. A step then finds little of its own code in the caches and costs three to five times as much.
On a shared machine, a loop of 5 ms without memory access is enough for that.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

CACHE_BYTES: Final = 4 << 20
"""Bytes written between two steps: more than a core's own caches."""
OTHER_WORK_SECONDS: Final = 0.005
STEPS: Final = 1500
STEPS_WITH_OTHER_WORK: Final = 400

_BLANK: Final = bytes(CACHE_BYTES)
_other_data: Final = bytearray(CACHE_BYTES)


def nothing() -> None:
    """Start the next step at once."""


def use_up_caches() -> None:
    _other_data[:] = _BLANK


def work_on_something_else() -> None:
    """Compute for `OTHER_WORK_SECONDS`."""
    end = time.perf_counter() + OTHER_WORK_SECONDS
    while time.perf_counter() < end:
        pass


def each(microseconds_of_a_step: Callable[[Callable[[], None], int], float]) -> Iterator[str]:
    """A measured cost for each of the three activities, as text. The function gets the activity and the number of
    steps.
    """
    yield f"{microseconds_of_a_step(nothing, STEPS):6.0f} us a step"
    yield f"{microseconds_of_a_step(use_up_caches, STEPS):6.0f} us with cold caches"
    yield f"{microseconds_of_a_step(work_on_something_else, STEPS_WITH_OTHER_WORK):6.0f} us after 5 ms of other work"
