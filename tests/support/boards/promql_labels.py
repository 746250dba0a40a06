"""Which labels a PromQL expression relies on, and which the series in it have: read from its text, not evaluated.

Aggregations are reduced from within: `sum by (a, b) (…)` becomes an operand with the labels a and b. It knows as
much of PromQL as the shipped rules and boards use; what it can't read is an error, not a pass.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from boards.metrics_page import METRICS
from boards.rule_names import shipped_rules

ADDED_BY_SCRAPES: Final[Mapping[str, frozenset[str]]] = {
    "stage": frozenset({"cluster", "job", "namespace", "model", "group", "pod", "release"}),
    "rank": frozenset({"cluster", "job", "namespace", "model", "group", "pod", "release"}),
    "engine": frozenset({"cluster", "job", "namespace", "model", "group", "pod", "release"}),
    "gateway": frozenset({"cluster", "job", "namespace", "pod"}),
    "operator": frozenset({"cluster", "job", "pod", "release"}),
}
"""Labels that docs/metrics.md promises besides the exporters' own."""
EXPORTED: Final[Mapping[str, frozenset[str]]] = {
    sample: frozenset(spec.labels) | ADDED_BY_SCRAPES[component] | ({"le"} if sample.endswith("_bucket") else set())
    for component, specs in METRICS.items()
    for spec in specs
    for sample in spec.sample_names
}
UP: Final = frozenset({"instance", "endpoint"}).union(*ADDED_BY_SCRAPES.values())
_TEXT: Final = re.compile(r'"[^"]*"')
_AGGREGATION: Final = re.compile(r"\b(sum|max|min|avg|count|group|topk)(?: by \(([^)]*)\))? ?\((?!\))")
_BRACKET: Final = re.compile(r"(?<!\w)(?<!\bon )(?<!\bby )(?<!group_left )(?<!group_right )\(")
_SERIES: Final = re.compile(
    r"(?<![\w:])(up|ALERTS|[a-z_]+:\w+:\w+|stageline_\w+|reduced_\d+)(?![\w:(])(?:\{([^}]*)\})?"
)
_ON: Final = re.compile(r"\bon \(([^)]*)\)")
_MATCHER: Final = re.compile(r"(\w+)\s*[=!]~?")
_ADDED: Final = re.compile(r',\s*"(\w+)",\s*"[^"]*",\s*"\w*",\s*"[^"]*"\s*\)')
"""How a label_replace ends."""
_COUNTED: Final = re.compile(r'count_values by \(([^)]*)\) \("(\w+)", ([^()]*)\)')


@dataclass
class Reading:
    """What is wrong with one expression; `labels` are those its result may have."""

    labels: frozenset[str] = frozenset()
    wrong: list[str] = field(default_factory=list)


def read(expr: str) -> Reading:
    """Every label that `expr` selects, groups or joins by, held against the series that should have it."""
    reading = Reading()
    reduced: dict[str, frozenset[str]] = {}
    without_groups = expr.replace('"(.*)"', '".*"')  # a bracket in a text is none of the expression's
    text = _COUNTED.sub(lambda found: _counted(found, reduced, reading), without_groups)
    reading.labels = _labels(re.sub(r"\bscalar\([^()]*\)", "1", text), reduced, reading)
    return reading


def labels_of(name: str) -> frozenset[str]:
    """Of an exported or recorded series."""
    if name == "up":
        return UP
    if name == "ALERTS":
        alerts = (rule for rule in shipped_rules() if "alert" in rule)
        return frozenset({"alertname", "alertstate"}).union(*map(alert_labels, alerts))
    if ":" not in name:
        return EXPORTED[name]
    found = [rule for rule in shipped_rules() if rule.get("record") == name]
    assert found, f"no rule records {name}"
    return read(found[0]["expr"]).labels


def alert_labels(rule: Mapping[str, Any]) -> frozenset[str]:
    """Those that an alert may have, its rule's own among them."""
    return read(rule["expr"]).labels | frozenset(rule["labels"])


def _labels(text: str, reduced: dict[str, frozenset[str]], reading: Reading) -> frozenset[str]:
    """Of the result of `text`; aggregations and brackets in it are put into `reduced`."""
    while found := _AGGREGATION.search(text):
        end = _closing(text, found.end() - 1)
        inside = text[found.end() : end]
        kept = _names(found[2] or "")
        # Where two sides are joined, one may bring a label that the other lacks.
        available = _labels(inside, reduced, reading)
        if not kept <= available:
            reading.wrong.append(f"by {sorted(kept - available)}: {inside.strip()} has {sorted(available)}")
        left = available if found[1] == "topk" else kept
        text = text[: found.start()] + _placeholder(reduced, left) + text[end + 1 :]
    if unread := re.search(r"\b(by|without|ignoring) ?\(", text):
        raise ValueError(f"{unread[0]} is not understood here: {text}")
    while found := _BRACKET.search(text):
        end = _closing(text, found.start())
        inner = _labels(text[found.end() : end], reduced, reading)
        text = text[: found.start()] + _placeholder(reduced, inner) + text[end + 1 :]
    operands = _operands(text, reduced, reading)
    added = frozenset(_ADDED.findall(text))
    for joined in map(_names, _ON.findall(text)):
        lacking = [f"on {sorted(joined - each)}: {text.strip()}" for each in operands if not joined <= each | added]
        reading.wrong.extend(lacking)
    return frozenset().union(added, *operands)


def _operands(text: str, reduced: Mapping[str, frozenset[str]], reading: Reading) -> list[frozenset[str]]:
    operands = []
    for name, matchers in _SERIES.findall(text):
        labels = reduced[name] if name in reduced else labels_of(name)
        matched = frozenset(_MATCHER.findall(_TEXT.sub('""', matchers)))
        if not matched <= labels:
            reading.wrong.append(f"{name} has no {sorted(matched - labels)}")
        operands.append(labels)
    return operands


def _counted(found: re.Match[str], reduced: dict[str, frozenset[str]], reading: Reading) -> str:
    """Series by what they are counted by, each with its value as one more label."""
    counted = _labels(f"count by ({found[1]}) ({found[3]})", reduced, reading)
    return _placeholder(reduced, counted | {found[2]})


def _placeholder(reduced: dict[str, frozenset[str]], labels: frozenset[str]) -> str:
    name = f"reduced_{len(reduced)}"
    reduced[name] = labels
    return name


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, re.split(r",\s*", text.strip())))


def _closing(text: str, opening: int) -> int:
    """Where the bracket at `opening` is closed; brackets within strings don't count."""
    masked = _TEXT.sub(lambda found: "_" * len(found[0]), text)
    depth = 0
    for place in range(opening, len(masked)):
        depth += {"(": 1, ")": -1}.get(masked[place], 0)
        if not depth:
            return place
    raise ValueError(f"a bracket is never closed: {text}")
