"""PromQL from metric names: strings in, one expression out.

Two rules hold for all of them. Numerator and denominator are added up before they are divided, so no average is ever
averaged. And where nothing happened there is no sample rather than 0 or NaN: a panel then says "No data", which is what
it is. A comparison does that: NaN is neither above nor below anything.
"""

from collections.abc import Sequence
from typing import Final

WINDOW: Final = "$__rate_interval"
"""As short as the scrape interval allows: four scrapes at least."""


def selected(name: str, *matchers: str) -> str:
    """A selector: the metric, with those label matchers that aren't empty."""
    inside = ",".join(each for each in matchers if each)
    return f"{name}{{{inside}}}" if inside else name


def rate(name: str, *matchers: str, window: str = WINDOW) -> str:
    """Increase per second of each series of a counter."""
    return f"rate({selected(name, *matchers)}[{window}])"


def sum_by(labels: Sequence[str], expr: str) -> str:
    """Add up what agrees in `labels`."""
    return f"sum by ({', '.join(labels)}) ({expr})" if labels else f"sum({expr})"


def max_by(labels: Sequence[str], expr: str) -> str:
    """The largest of what agrees in `labels`."""
    return f"max by ({', '.join(labels)}) ({expr})" if labels else f"max({expr})"


def min_by(labels: Sequence[str], expr: str) -> str:
    """The smallest of what agrees in `labels`."""
    return f"min by ({', '.join(labels)}) ({expr})"


def rate_by(labels: Sequence[str], name: str, *matchers: str, window: str = WINDOW) -> str:
    """Increase per second of a counter, added up."""
    return sum_by(labels, rate(name, *matchers, window=window))


def share(part: str, whole: str) -> str:
    """`part` of `whole`, which have the same labels; 0 where only the part is missing, nothing where the whole is 0."""
    return f"({or_zero(part, whole)}) / ({whole} > 0)"


def quantile(level: float, labels: Sequence[str], histogram: str, *matchers: str) -> str:
    """A quantile of a histogram over the samples of the window; nothing when there were none."""
    buckets = rate_by(("le", *labels), f"{histogram}_bucket", *matchers)
    return f"histogram_quantile({level:g}, {buckets}) >= 0"


def mean(labels: Sequence[str], histogram: str, *matchers: str) -> str:
    """The mean of the samples of the window; nothing when there were none."""
    total = rate_by(labels, f"{histogram}_sum", *matchers)
    count = rate_by(labels, f"{histogram}_count", *matchers)
    return f"{total} / ({count} > 0)"


def buckets(histogram: str, *matchers: str) -> str:
    """Samples of the window by bucket, as Grafana's heatmap wants them."""
    return sum_by(("le",), f"increase({selected(f'{histogram}_bucket', *matchers)}[{WINDOW}])")


def in_order(expr: str) -> str:
    """The same with stages 0 to 9 written with two digits: names are sorted as text, and 10 comes after 9.

    For all that lists stages: rows, bars and legends.
    """
    return f'label_replace({expr}, "stage", "0$1", "stage", "([0-9])")'


def events(labels: Sequence[str], name: str, *matchers: str) -> str:
    """How often a rare thing happened in the window, in whole numbers; nothing where it did not.

    A counter less what it was before the window. `increase` makes four of three, since it extrapolates to the ends of
    the window; it serves where the counter began anew. It can't see a counter's first step either, because the series
    begins with it: it is not there before the first event. A series that wasn't there in the hour before counts by its
    value; one that was only not scraped for a while does not.
    """
    counter = selected(name, *matchers)
    more = f"({counter} - {counter} offset {WINDOW})"
    born = f"({counter} unless max_over_time({counter}[1h] offset {WINDOW}))"
    began_anew = f"(round(increase({counter}[{WINDOW}])) unless {more} >= 0)"
    return sum_by(labels, f"{more} >= 0 or {born} or {began_anew}") + " > 0"


def or_zero(expr: str, where: str) -> str:
    """`expr`, and 0 where only `where`, which has the same labels, is there."""
    return f"{expr} or 0 * {where}"


def current(labels: Sequence[str], gauge: str, *matchers: str) -> str:
    """A gauge that every replica of a process shows alike, once."""
    return max_by(labels, selected(gauge, *matchers))
