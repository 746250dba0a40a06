"""What the shipped rules add up over long windows, and days of it as they themselves would have recorded it.

A recorded series is as dense as its group of rules is evaluated, so that its past here has one sample for each
evaluation, and is no longer than the longest window that any rule reads of it. Scraped series have no past.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from boards.metric_history import Labels, written
from boards.promql_labels import labels_of
from boards.rule_names import shipped_groups
from boards.scripted_fleet import NAMESPACE
from stageline_local.monitoring.scrape import seconds_of

BLOCK_SECONDS: Final = 2 * 3600
"""What promtool makes one block of."""
_READ_OVER: Final = re.compile(r"(?<!\w)(\w+:\w+:\w+)(?:\{[^}]*\})?\[(\w+)(?::\w+)?\]")
"""A recorded name and the window that it is read over, in steps or sample by sample."""
_MISSED: Final = re.compile(r"(_slow|_failed):")
"""Requests that missed an objective."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A recorded series of each model that some rule reads over longer than scrapes take to fill; all in seconds."""

    name: str
    window: int
    interval: int

    def lines(self, models: int, begin: int, end: int, until: int, *, burning: bool) -> Iterator[str]:
        """OpenMetrics of all models from `begin` until before `end`, of a past that ends at `until`."""
        first = max(begin, until - self.window)
        moments = range(first + -first % self.interval, end, self.interval)
        if not moments:
            return
        usual = 1.0 if burning or not _MISSED.search(self.name) else 0.0
        yield f"# TYPE {self.name} gauge\n"
        kept = _labels_left_on(self.name)
        for index in range(models):
            series = written(self.name, _labels(kept, f"model-{index:03d}"))
            values = (usual * (1 + moment // self.interval % 7 / 100) for moment in moments)
            yield "".join(f"{series} {value:g} {moment}\n" for value, moment in zip(values, moments, strict=True))


@cache
def intervals() -> Mapping[str, int]:
    """Seconds between two evaluations of each group of rules."""
    return {group["name"]: int(seconds_of(group["interval"])) for group in shipped_groups()}


def grouped_rules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every rule after the name of its group."""
    return ((group["name"], rule) for group in shipped_groups() for rule in group["rules"])


def remembered(longer_than: int) -> list[Remembered]:
    """What rules read over windows of more than so many seconds, by name."""
    windows: dict[str, int] = {}
    for _, rule in grouped_rules():
        for name, window in _READ_OVER.findall(rule["expr"]):
            windows[name] = max(windows.get(name, 0), int(seconds_of(window)))
    recorded = {rule.get("record"): intervals()[group] for group, rule in grouped_rules()}
    return [Remembered(name, windows[name], recorded[name]) for name in sorted(windows) if windows[name] > longer_than]


def blocks(series: list[Remembered], models: int, until: int, *, burning: bool) -> Iterator[str]:
    """OpenMetrics texts, one for each block that holds any of it. `burning`: all requests missed their objectives."""
    first = until - max(each.window for each in series)
    for begin in range(first - first % BLOCK_SECONDS, until, BLOCK_SECONDS):
        end = min(begin + BLOCK_SECONDS, until)
        yield (
            "".join(line for each in series for line in each.lines(models, begin, end, until, burning=burning))
            + "# EOF\n"
        )


@cache
def _labels_left_on(name: str) -> tuple[str, ...]:
    """By the rule that records it; there is one cluster, which needs no name."""
    return tuple(sorted(labels_of(name) - {"cluster"}))


def _labels(kept: tuple[str, ...], model: str) -> Labels:
    """Of a model's only group. KeyError for a label that isn't scripted."""
    texts = {"namespace": NAMESPACE, "model_name": model, "model": model, "group": "0", "ready": "true"}
    return tuple((label, texts[label]) for label in kept)
