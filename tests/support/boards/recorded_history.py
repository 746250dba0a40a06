"""What the shipped recording rules would have recorded of a past, computed by Prometheus itself.

A rule that reads other rules' series is asked once those are written, in rounds: what reads none comes first.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from boards.backfilled_prometheus import BackfilledPrometheus
from boards.metric_history import MetricHistory, written
from boards.rule_names import shipped_rules

STEP_SECONDS: Final = 60
_RECORDED: Final = re.compile(r"[a-z_]+:\w+:\w+")


@cache
def recorded() -> Mapping[str, str]:
    """Expressions by the names that they are recorded under."""
    return {rule["record"]: rule["expr"] for rule in shipped_rules() if "record" in rule}


def recorded_names(exprs: Iterable[str]) -> frozenset[str]:
    """Names of recorded series that expressions read."""
    return frozenset(name for expr in exprs for name in _RECORDED.findall(expr))


def rounds_of(names: Iterable[str]) -> list[frozenset[str]]:
    """`names` and all that they are computed from, each after what it reads. Raises KeyError for an unknown name."""
    depths: dict[str, int] = {}

    def depth_of(name: str) -> int:
        if name not in depths:
            read = recorded_names([recorded()[name]])
            depths[name] = 1 + max((depth_of(each) for each in read), default=-1)
        return depths[name]

    deepest = max((depth_of(name) for name in names), default=-1)
    return [frozenset(name for name, depth in depths.items() if depth == each) for each in range(deepest + 1)]


def record(
    names: Iterable[str], prometheus: BackfilledPrometheus, start: float, end: float, history: MetricHistory
) -> None:
    """Add what would have been recorded under `names` between two moments; what they read has been written."""
    for name in sorted(names):
        for series in _evaluated(recorded()[name], prometheus, start, end):
            text = written(name, tuple((key, label) for key, label in series["metric"].items() if key != "__name__"))
            for moment, value in series["values"]:
                history.add(name, "gauge", text, float(value), float(moment))


def _evaluated(expr: str, prometheus: BackfilledPrometheus, start: float, end: float) -> list[dict[str, Any]]:
    """What a rule says at each step.

    A range query is quicker, but one with `count_values by (…)` loses the labels that it groups by after its first step
    (seen with Prometheus 2.42). Rules are evaluated a moment at a time, so those are asked for as rules are.
    """
    if "count_values" not in expr:
        return prometheus.between(expr, start, end, STEP_SECONDS)
    moments = range(int(start), int(end) + 1, STEP_SECONDS)
    return [series for moment in moments for series in prometheus.at(expr, moment)]
