"""Counts of a histogram, kept by one thread: an observation is a bisection and two additions, without a lock.

prometheus_client's own histogram takes a lock and several microseconds; the runner's thread observes at every step.
"""

from bisect import bisect_left
from collections.abc import Sequence


class BucketCounts:
    """How many values fell at or below each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value. By the owner's thread only."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(bound, number of values up to it) for each bound and `+Inf`, and the sum of all. For any thread."""
        total = 0.0
        buckets: list[tuple[str, float]] = []
        counts, value_sum = self._counts[:], self._sum
        for bound, count in zip((*map(repr, map(float, self._bounds)), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, value_sum
