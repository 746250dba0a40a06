"""Microseconds of queued work on a device, by its own events."""

from collections.abc import Callable
from statistics import median

from stageline_runtime.accelerator.protocol import Accelerator

WARM_UP_RUNS = 3
ROUNDS = 15


def median_microseconds(accelerator: Accelerator, work: Callable[[], object]) -> float:
    """The median of some runs, each between two events of the compute stream."""
    for _ in range(WARM_UP_RUNS):
        work()
    ends = []
    for _ in range(ROUNDS):
        begin = accelerator.main.record(timed=True)
        work()
        ends.append((begin, accelerator.main.record(timed=True)))
    accelerator.synchronize()
    return 1e6 * median(end.seconds_since(begin) for begin, end in ends)
