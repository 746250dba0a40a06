"""What operators are told of a gateway, and tell it, as a whole: of one process here, of several in `worker`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stageline_gateway.admission.accounts import Books, OwnBooks
from stageline_gateway.telemetry.metrics import GatewayMetrics

State = Mapping[str, Any]
"""What `/status` of the admin port says, as JSON."""


class Whole:
    """A gateway of one process."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.metrics = metrics
        self.state: Callable[[], State] = dict
        """Of this process."""
        self.close: Callable[[], None] = lambda: None
        """Has this process take no more requests."""

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page of metrics, and its content type. Raises ApiError 503 when some of it can't be had."""
        return self.metrics.registry.exposition(accept)

    async def status(self) -> State:
        """Raises ApiError 503 when some of it can't be had."""
        return self.state()

    def drain(self) -> None:
        """Take no more requests, anywhere."""
        self.close()


@dataclass(frozen=True)
class Place:
    """Where a process stands in its gateway: here, alone."""

    books: Books = field(default_factory=OwnBooks)
    worker: int | None = None
    """Its number among several."""
    first_read_seconds: float = 0.0
    """How long it may wait for what is served before it listens."""

    def whole(self, metrics: GatewayMetrics) -> Whole:
        """To be called once."""
        return Whole(metrics)


_SUMS = ("open_requests", "tasks")
_ANY = ("draining",)


def together(own: State, all_states: Sequence[State]) -> State:
    """The state of a gateway from that of its workers. What all know alike is told as `own`, one of them, has it."""
    bodies = [each["bodies"] for each in all_states]
    queued: dict[str, int] = {}
    for each in all_states:
        for model, count in each["queued_requests"].items():
            queued[model] = queued.get(model, 0) + count
    return {
        **own,
        **{name: any(each[name] for each in all_states) for name in _ANY},
        **{name: sum(each[name] for each in all_states) for name in _SUMS},
        "bodies": {
            "bytes": sum(each["bytes"] for each in bodies),
            "most_bytes": max(each["most_bytes"] for each in bodies),
            "being_read": sum(each["being_read"] for each in bodies),
        },
        "queued_requests": queued,
        "problems": list(dict.fromkeys(problem for each in all_states for problem in each["problems"])),
        "workers": len(all_states),
    }
