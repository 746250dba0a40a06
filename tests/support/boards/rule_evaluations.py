"""How long Prometheus took for each evaluation of the shipped rules, and what is to be said of it.

Groups are evaluated side by side, each in its own time, and an evaluation is missed only where one group takes longer
than its interval. So what must hold is that every group's median is under a second. Said beside it: the sum of all
groups in turn, which nothing waits for, and the share of a core that they take at their intervals.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from boards.long_windows import intervals

AT_MOST_SECONDS: Final = 1.0
"""A group's median, of intervals from 30 s on."""
SLOWEST_RULES: Final = 12
"""Printed."""


@dataclass(slots=True)
class Evaluations:
    """Seconds that each evaluation took, by its moment."""

    groups: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    rules: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    firing: int = 0
    """Alerts at the end."""

    def add(self, said: Sequence[Mapping[str, Any]]) -> None:
        """What Prometheus says of its groups now."""
        for group in said:
            _add(self.groups[group["name"]], group)
            for place, rule in enumerate(group["rules"], start=1):
                _add(self.rules[f"{rule['name']} ({group['name']}, rule {place})"], rule)
        rules = [rule for group in said for rule in group["rules"]]
        self.firing = sum(alert["state"] == "firing" for rule in rules for alert in rule.get("alerts", ()))


def _add(found: dict[str, float], evaluated: Mapping[str, Any]) -> None:
    """Unless it has not been evaluated yet."""
    if not evaluated["lastEvaluation"].startswith("0001"):
        found[evaluated["lastEvaluation"]] = evaluated["evaluationTime"]


def medians(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds, the longest first."""
    middle = {name: statistics.median(each.values()) for name, each in found.items() if each}
    return dict(sorted(middle.items(), key=lambda item: -item[1]))


def too_slow(groups: Mapping[str, float]) -> list[str]:
    """Those whose median is not under `AT_MOST_SECONDS`, and those that were never evaluated."""
    return sorted(name for name in intervals() if not groups.get(name, AT_MOST_SECONDS) < AT_MOST_SECONDS)


def share_of_a_core(groups: Mapping[str, float]) -> float:
    """Seconds of evaluation per second, each group at its own interval; wall time, so an upper bound of CPU time."""
    return sum(median / intervals()[name] for name, median in groups.items())


def report(found: Evaluations, series: int) -> Iterator[str]:
    """Lines: what each group took, all of them together, and the dearest rules."""
    groups = medians(found.groups)
    yield f"{series} scraped series that rules read; {found.firing} alerts fire"
    yield "milliseconds of an evaluation, median and worst:"
    for name, median in groups.items():
        took = found.groups[name].values()
        often = f"every {intervals()[name]} s, {len(took)} times"
        yield f"{median * 1000:8.1f} {max(took) * 1000:8.1f}  {name} ({often})"
    yield f"{sum(groups.values()) * 1000:8.1f} for all {len(groups)} groups, were they evaluated one after the other"
    yield f"{share_of_a_core(groups):8.2%} of one core, each group at its interval"
    for name, median in list(medians(found.rules).items())[:SLOWEST_RULES]:
        yield f"{median * 1000:8.1f} of it for {name}"
    slow = too_slow(groups)
    if slow:
        yield f"{AT_MOST_SECONDS:g} s or more: {', '.join(slow)}"
    else:
        yield f"every group takes less than {AT_MOST_SECONDS:g} s"
