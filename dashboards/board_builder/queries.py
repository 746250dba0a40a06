"""PromQL from metric names: strings in, one expression out.

Two rules apply to all of them. Numerator and denominator are summed before the division, so averages are never
averaged. Without events there is no sample rather than 0 or NaN: the panel then shows "No data". A comparison ensures
that, because NaN is neither above nor below any value.
"""

from collections.abc import Sequence
from typing import Final

WINDOW: Final = "$__rate_interval"
"""As short as the scrape interval allows: at least four scrapes."""


def selected(name: str, *matchers: str) -> str:
    """A selector: the metric, with the non-empty label matchers."""
    inside = ",".join(each for each in matchers if each)
    return f"{name}{{{inside}}}" if inside else name


def rate(name: str, *matchers: str, window: str = WINDOW) -> str:
    """Increase per second of each series of a counter."""
    return f"rate({selected(name, *matchers)}[{window}])"


def sum_by(labels: Sequence[str], expr: str) -> str:
    """Sum over series with equal `labels`."""
    return f"sum by ({', '.join(labels)}) ({expr})" if labels else f"sum({expr})"


def max_by(labels: Sequence[str], expr: str) -> str:
    """Maximum over series with equal `labels`."""
    return f"max by ({', '.join(labels)}) ({expr})" if labels else f"max({expr})"


def min_by(labels: Sequence[str], expr: str) -> str:
    """Minimum over series with equal `labels`."""
    return f"min by ({', '.join(labels)}) ({expr})"


def rate_by(labels: Sequence[str], name: str, *matchers: str, window: str = WINDOW) -> str:
    """Increase per second of a counter, summed by `labels`."""
    return sum_by(labels, rate(name, *matchers, window=window))


def share(part: str, whole: str) -> str:
    """`part` divided by `whole`, which has the same labels; 0 if only the part is missing, no sample if the
    whole is 0.
    """
    return f"({or_zero(part, whole)}) / ({whole} > 0)"


def quantile(level: float, labels: Sequence[str], histogram: str, *matchers: str) -> str:
    """A quantile of a histogram over the samples of the window; no sample if there were none."""
    buckets = rate_by(("le", *labels), f"{histogram}_bucket", *matchers)
    return f"histogram_quantile({level:g}, {buckets}) >= 0"


def mean(labels: Sequence[str], histogram: str, *matchers: str) -> str:
    """The mean of the samples of the window; no sample if there were none."""
    total = rate_by(labels, f"{histogram}_sum", *matchers)
    count = rate_by(labels, f"{histogram}_count", *matchers)
    return f"{total} / ({count} > 0)"


def buckets(histogram: str, *matchers: str) -> str:
    """Samples of the window by bucket, in the form of Grafana's heatmap."""
    return sum_by(("le",), f"increase({selected(f'{histogram}_bucket', *matchers)}[{WINDOW}])")


def in_order(expr: str) -> str:
    """The same with stages 0 to 9 as two digits: names are sorted as text, and 10 must come after 9.

    For every list of stages: rows, bars and legends.
    """
    return f'label_replace({expr}, "stage", "0$1", "stage", "([0-9])")'


def events(labels: Sequence[str], name: str, *matchers: str) -> str:
    """Number of rare events in the window, as an integer; no sample if there were none.

    This is the counter minus its value before the window. `increase` would turn three into four, because it
    extrapolates to the ends of the window; it is only used after a counter reset. It also misses a counter's first
    step, because the series starts with the first event. A series that did not exist in the hour before counts by its
    value; one that was only not scraped for a while does not.
    """
    counter = selected(name, *matchers)
    more = f"({counter} - {counter} offset {WINDOW})"
    born = f"({counter} unless max_over_time({counter}[1h] offset {WINDOW}))"
    began_anew = f"(round(increase({counter}[{WINDOW}])) unless {more} >= 0)"
    return sum_by(labels, f"{more} >= 0 or {born} or {began_anew}") + " > 0"


def or_zero(expr: str, where: str) -> str:
    """`expr`, and 0 if only `where`, which has the same labels, has a sample."""
    return f"{expr} or 0 * {where}"


def current(labels: Sequence[str], gauge: str, *matchers: str) -> str:
    """A gauge that every replica of a process exposes with the same value, once."""
    return max_by(labels, selected(gauge, *matchers))
