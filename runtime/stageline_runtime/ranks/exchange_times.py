"""What a rank's exchanges took so far, and which one it is in. Without torch: telemetry reads it."""

from dataclasses import dataclass


@dataclass(slots=True)
class ExchangeTimes:
    """Written by the rank's own thread, read by any. On a device both are estimated from some exchanges of many."""

    count: int = 0
    seconds: float = 0.0
    """Most of it waiting for others: the rank that waits least is the slow one."""


@dataclass(frozen=True, slots=True)
class UnfinishedExchange:
    """An exchange that a rank's device has not come past."""

    operation: str
    late: tuple[int, ...]
    """The ranks that have not come to it."""
