"""What a rank's exchanges took so far, and which one it is in. Without torch: telemetry reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class ExchangeTimes:
    """Written by the rank's own thread, read by any. On a device both are estimated from some exchanges of many."""

    count: int = 0
    seconds: float = 0.0
    """Most of it waiting for others: the rank that waits least is the slow one."""
    is_computing: bool = True
    """Whether exchanges are part of the computation; others aren't counted."""

    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        """Nothing that is exchanged within the block is counted."""
        self.is_computing = False
        try:
            yield
        finally:
            self.is_computing = True


@dataclass(frozen=True, slots=True)
class UnfinishedExchange:
    """An exchange that a rank's device has not come past."""

    operation: str
    late: tuple[int, ...]
    """The ranks that have not reached it."""
