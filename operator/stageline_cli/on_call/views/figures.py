"""Formats numbers for people; a dash stands for unknown values. Pure."""

from datetime import datetime
from typing import Final

UNKNOWN: Final = "-"
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86_400


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def fine_percent(share: float | None) -> str:
    """`0.8 %`, for small shares that matter: errors, cache usage."""
    if share is None or share == 0 or share >= 0.0995:
        return percent(share)
    return f"{100 * share:.2g} %"


def rate(per_second: float | None) -> str:
    """`3.2`, or `141` without decimals for large rates."""
    if per_second is None:
        return UNKNOWN
    return f"{per_second:.1f}" if per_second < 100 else f"{per_second:.0f}"


def milliseconds(seconds: float | None) -> str:
    """`92 ms`, or `2.1 s`."""
    if seconds is None:
        return UNKNOWN
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def age(since: datetime | None, now: datetime) -> str:
    """How long ago, in one unit: `12 s`, `5 min`, `3 h`, `2 d`."""
    if since is None:
        return UNKNOWN
    seconds = max(0.0, (now - since).total_seconds())
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} d"
