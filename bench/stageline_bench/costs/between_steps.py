"""What a core does between two measured steps. It decides most of what a step then costs.

Code that ran a moment ago is in the core's caches. In a group layers run for 20 ms between two steps, and others on the
same machine meanwhile: a step then finds little of its own code, and costs three to five times as much. A loop that
touches no memory for 5 ms is enough for that on a machine that is shared.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

CACHE_BYTES: Final = 4 << 20
"""Written between two steps: more than a core's own caches hold."""
OTHER_WORK_SECONDS: Final = 0.005
STEPS: Final = 1500
STEPS_WITH_OTHER_WORK: Final = 400

_BLANK: Final = bytes(CACHE_BYTES)
_other_data: Final = bytearray(CACHE_BYTES)


def nothing() -> None:
    """The next step comes at once."""


def use_up_caches() -> None:
    _other_data[:] = _BLANK


def work_on_something_else() -> None:
    """For `OTHER_WORK_SECONDS`."""
    end = time.perf_counter() + OTHER_WORK_SECONDS
    while time.perf_counter() < end:
        pass


def each(microseconds_of_a_step: Callable[[Callable[[], None], int], float]) -> Iterator[str]:
    """A measured cost for each of the three, in words. The function is told what comes between, and how many steps."""
    yield f"{microseconds_of_a_step(nothing, STEPS):6.0f} us a step"
    yield f"{microseconds_of_a_step(use_up_caches, STEPS):6.0f} us with cold caches"
    yield f"{microseconds_of_a_step(work_on_something_else, STEPS_WITH_OTHER_WORK):6.0f} us after 5 ms of other work"
