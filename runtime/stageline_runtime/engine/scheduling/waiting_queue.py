"""Requests without a slot, the one that gets the next slot first: by priority, then by arrival. Pure.

The first one is never passed over for one that would fit sooner, so a long prompt is not starved by short ones. A
request that lost its slot comes back to its old place, before all of its priority that came after it.
"""

from bisect import insort

from stageline_runtime.engine.scheduling.request import Request


class WaitingQueue:
    """Requests in the order in which they get slots."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def first(self) -> Request | None:
        """Who is next."""
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        """Queue a request at its place."""
        insort(self._requests, request, key=lambda each: each.seniority)

    def take_first(self) -> Request:
        """Remove who is next."""
        return self._requests.pop(0)

    def remove(self, request_id: str) -> bool:
        """Forget a request; False when it isn't here."""
        for index, request in enumerate(self._requests):
            if request.request_id == request_id:
                del self._requests[index]
                return True
        return False
