"""What a key has used of its limits: token buckets and a count. Pure: time is an argument.

A bucket holds a minute's worth and fills evenly. A request takes one from the bucket of requests when it is let in.
Tokens are taken as they are counted, the prompt's when the engine has counted them and each of the answer's when it
comes: a bucket of tokens may be overdrawn by what is being answered, and nothing is let in until that is paid back.
"""

from dataclasses import dataclass, field
from typing import Final

from stageline_gateway.admission.keys import Limits

WINDOW_SECONDS: Final = 60.0


@dataclass(slots=True)
class Bucket:
    """Starts full."""

    capacity: int
    level: float
    at_seconds: float
    """When `level` was true."""

    def fill(self, now_seconds: float) -> None:
        """Let time pass."""
        gained = max(0.0, now_seconds - self.at_seconds) * self.capacity / WINDOW_SECONDS
        self.level, self.at_seconds = min(self.capacity, self.level + gained), now_seconds

    def take(self, amount: float) -> None:
        """Take, into debt if need be."""
        self.level -= amount

    def seconds_until(self, level: float) -> float:
        """How long until it holds `level`."""
        return max(0.0, (level - self.level) * WINDOW_SECONDS / self.capacity)


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that keeps a request out: its name in the keys file, its value, and when to try again."""

    limit: str
    value: int
    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one limit leaves, for the `x-ratelimit-*` headers."""

    kind: str
    limit: int
    remaining: int
    reset_seconds: float
    """Until the limit is whole again."""


@dataclass(slots=True)
class KeyUse:
    """One key's use."""

    limits: Limits = field(default_factory=Limits)
    running: int = 0
    """Places taken: each choice of a request takes one."""
    _requests: Bucket | None = None
    _tokens: Bucket | None = None

    def follow(self, limits: Limits, now_seconds: float) -> None:
        """Take over the limits of a newer version of the keys; what was used stays used."""
        self._requests = _adapted(self._requests, limits.requests_per_minute, now_seconds)
        self._tokens = _adapted(self._tokens, limits.tokens_per_minute, now_seconds)
        self.limits = limits

    def exceeded(self, places: int = 1) -> Exceeded | None:
        """What keeps another request of so many places out now, or None. `follow` must have been called for now."""
        most = self.limits.concurrency
        if most is not None and self.running + places > most:
            return Exceeded("concurrency", most, 1.0)
        if self._requests is not None and self._requests.level < 1:
            return Exceeded("requestsPerMinute", self._requests.capacity, self._requests.seconds_until(1))
        if self._tokens is not None and self._tokens.level <= 0:
            return Exceeded("tokensPerMinute", self._tokens.capacity, self._tokens.seconds_until(1))
        return None

    def begin(self, places: int = 1) -> None:
        """A request is let in."""
        self.running += places
        if self._requests is not None:
            self._requests.take(1)

    def spend(self, tokens: int) -> None:
        """Tokens were counted."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def end(self, places: int = 1) -> None:
        """A request of so many places is over."""
        self.running -= places

    def allowances(self) -> list[Allowance]:
        """What the limits per minute leave."""
        buckets = {"requests": self._requests, "tokens": self._tokens}
        return [
            Allowance(kind, one.capacity, max(0, int(one.level)), one.seconds_until(one.capacity))
            for kind, one in buckets.items()
            if one is not None
        ]


def _adapted(bucket: Bucket | None, capacity: int | None, now_seconds: float) -> Bucket | None:
    if capacity is None:
        return None
    if bucket is None:
        return Bucket(capacity, capacity, now_seconds)
    bucket.fill(now_seconds)
    if bucket.capacity != capacity:
        used = bucket.capacity - bucket.level
        return Bucket(capacity, capacity - used, now_seconds)
    return bucket
