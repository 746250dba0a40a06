"""Which entries of a shared cache are evicted for a new one: the longest unused first. Pure.

It never evicts an entry that is read or written, or that was used a moment ago: between the end of a pod's preparation
and the start of its readers no process holds it. If all evictable entries together are too small, none is evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One entry. Times are seconds of the clock of file times."""

    key: str
    size_bytes: int
    last_use: float
    is_in_use: bool
    """Somebody reads it, writes it, or is about to."""


@dataclass(frozen=True, slots=True)
class Space:
    """What there is. What others have announced to write counts as written."""

    used_bytes: int
    """By all that the cache holds, other things than entries included."""
    free_bytes: int
    """Of the volume."""
    limit_bytes: int
    """What the cache may hold."""


@dataclass(frozen=True, slots=True)
class Choice:
    removed: tuple[CachedModel, ...]
    short_bytes: int
    """What is missing even when all is removed that may be; then `removed` is empty."""


def choose(
    models: Sequence[CachedModel], space: Space, needed_bytes: int, *, now: float, fresh_seconds: float
) -> Choice:
    """What to remove before `needed_bytes` more are written. A model used within `fresh_seconds` stays."""
    missing = max(space.used_bytes + needed_bytes - space.limit_bytes, needed_bytes - space.free_bytes, 0)
    idle = (each for each in models if not each.is_in_use and now - each.last_use >= fresh_seconds)
    removed: list[CachedModel] = []
    for each in sorted(idle, key=lambda model: (model.last_use, model.key)):
        if missing <= 0:
            break
        removed.append(each)
        missing -= each.size_bytes
    return Choice((), missing) if missing > 0 else Choice(tuple(removed), 0)
