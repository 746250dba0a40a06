"""What the shipped recording rules would have recorded of a past, computed by Prometheus itself.

A rule that reads other rules' series is asked with their expressions in place of their names, so that no order matters.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

import yaml

from boards.backfilled_prometheus import BackfilledPrometheus
from boards.metric_history import MetricHistory, written
from stageline_dashboards.shipped import rule_paths

STEP_SECONDS: Final = 60
_RECORDED: Final = re.compile(r"[a-z_]+:\w+:\w+")


@cache
def recorded() -> Mapping[str, str]:
    """Expressions by the names that they are recorded under."""
    files = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in rule_paths())
    rules = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    return {rule["record"]: rule["expr"] for rule in rules if "record" in rule}


def recorded_names(exprs: Iterable[str]) -> frozenset[str]:
    """Names of recorded series that expressions read."""
    return frozenset(name for expr in exprs for name in _RECORDED.findall(expr))


def spelt_out(name: str) -> str:
    """A rule's expression in terms of exported series alone. Raises KeyError for a name that no rule records."""
    return _RECORDED.sub(lambda found: f"({spelt_out(found[0])})", recorded()[name])


def record(
    names: Iterable[str], prometheus: BackfilledPrometheus, start: float, end: float, history: MetricHistory
) -> None:
    """Add what would have been recorded under `names` between two moments."""
    for name in sorted(names):
        for series in prometheus.between(spelt_out(name), start, end, STEP_SECONDS):
            text = written(name, tuple((key, label) for key, label in series["metric"].items() if key != "__name__"))
            for moment, value in series["values"]:
                history.add(name, "gauge", text, float(value), float(moment))
