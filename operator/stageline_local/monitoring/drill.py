"""Rules whose alerts fire sooner, for drills: every `for` and `keep_firing_for` divided by a factor. Pure.

Expressions stay as they are, the windows in them too, so an alert still sees what it would see in earnest. Only how
long its condition must have held is shortened.
"""

import re
from typing import Any, Final

_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_PART: Final = re.compile(r"(\d+)(ms|[smhdwy])")
_HOLDS: Final = ("for", "keep_firing_for")


def quickened(rules: dict[str, Any], factor: float) -> dict[str, Any]:
    """A rule file's content with every alert's holding times divided by `factor`."""
    groups = [group | {"rules": [_quick(rule, factor) for rule in group["rules"]]} for group in rules["groups"]]
    return rules | {"groups": groups}


def _quick(rule: dict[str, Any], factor: float) -> dict[str, Any]:
    shorter = {key: f"{round(seconds_of(rule[key]) * 1000 / factor)}ms" for key in _HOLDS if key in rule}
    return rule | shorter


def seconds_of(duration: str) -> float:
    """Seconds of a Prometheus duration such as `1h30m`; raises `ValueError` for anything else."""
    if duration == "0":
        return 0.0
    parts = _PART.findall(duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is no duration as Prometheus writes them")
    return float(sum(int(number) * _UNIT_SECONDS[unit] for number, unit in parts))
