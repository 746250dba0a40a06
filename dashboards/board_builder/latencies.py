"""A duration for on-call engineers: quantiles and mean, and beside them a heatmap of the samples."""

from typing import Final

from grafana_foundation_sdk.builders import heatmap, timeseries

from board_builder.panels import Limits, Series, Text, histogram_heatmap, lines
from board_builder.queries import buckets, mean, quantile
from stageline_gateway.telemetry import metric_names as gateway

LEVELS: Final = (0.5, 0.9, 0.95, 0.99)
TRACED: Final = (gateway.TIME_TO_FIRST_TOKEN.name, gateway.E2E_REQUEST_LATENCY.name)
"""Histograms with trace ids as exemplars."""


def quantile_lines(text: Text, histogram: str, *matchers: str, limits: Limits | None = None) -> timeseries.Panel:
    """p50, p90, p95, p99 and the mean over everything selected."""
    series = [Series(quantile(level, (), histogram, *matchers), f"p{level * 100:g}") for level in LEVELS]
    return lines(text, *series, Series(mean((), histogram, *matchers), "mean"), limits=limits)


def heat(text: Text, histogram: str, *matchers: str) -> heatmap.Panel:
    """Samples by bucket over time: shows two humps that a quantile would hide, and the number of samples.

    If requests are traced, some samples are points that link to their traces.
    """
    return histogram_heatmap(text, buckets(histogram, *matchers), exemplars=histogram in TRACED)
