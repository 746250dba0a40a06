"""A circuit breaker for one incarnation of a group, as immutable states and the steps between them. Pure.

Closed: requests pass, and failures in a row are counted. Open: none passes for a cool-down. Half-open: after it one
request is let through on trial; if it gets a token the circuit closes, if it fails the circuit opens for twice as long.
A trial that shows neither for `trial_seconds` (a long queue, a client that left) holds the others no longer: the next
one is let through on trial too. So however requests end, an engine in doubt gets one in that time and no more.
"""

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    """When a circuit opens, and for how long."""

    failures_to_open: int = 3
    """Failures in a row. An engine that can't be reached at all opens it at once."""
    cool_down_seconds: float = 1.0
    longest_cool_down_seconds: float = 30.0
    trial_seconds: float = 2.0
    """How long others wait for what a trial shows."""


@dataclass(frozen=True, slots=True)
class Circuit:
    """What requests have shown of a group's engine. Times are seconds on one monotonic clock."""

    failures: int = 0
    """In a row."""
    openings: int = 0
    """In a row; 0 means closed."""
    shut_until_seconds: float = 0.0
    """No request passes before: the cool-down's end, or that of the last trial's time for itself."""
    cooled_at_seconds: float = 0.0
    """The cool-down's end."""

    @property
    def is_closed(self) -> bool:
        """Whether all requests pass."""
        return self.openings == 0

    def admits(self, now_seconds: float) -> bool:
        """Whether one more request may pass."""
        return self.is_closed or now_seconds >= self.shut_until_seconds

    def started(self, now_seconds: float, policy: CircuitPolicy) -> "Circuit":
        """A request was let through."""
        return self if self.is_closed else replace(self, shut_until_seconds=now_seconds + policy.trial_seconds)

    def answered(self) -> "Circuit":
        """A request got a token."""
        return CLOSED

    def failed(self, now_seconds: float, policy: CircuitPolicy, at_once: bool = False) -> "Circuit":
        """A request failed; `at_once` when no other would have gone better."""
        failures = self.failures + 1
        if self.is_closed and not at_once and failures < policy.failures_to_open:
            return replace(self, failures=failures)
        if now_seconds < self.cooled_at_seconds:
            return replace(self, failures=failures)  # one of several that were under way when it opened
        cool_down_seconds = min(
            policy.cool_down_seconds * 2.0 ** min(self.openings, 30), policy.longest_cool_down_seconds
        )
        cooled_at_seconds = now_seconds + cool_down_seconds
        return Circuit(failures, self.openings + 1, cooled_at_seconds, cooled_at_seconds)


CLOSED: Final = Circuit()
