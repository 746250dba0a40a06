"""Rates and latencies from token arrival times, and medians of pairs. Pure.

All times are seconds of one monotonic clock, which on Linux all processes of a machine share.
"""

from collections.abc import Sequence
from statistics import mean, median

from pydantic import BaseModel, ConfigDict

from stageline_bench.runtime.record.stage_clock import StageSeconds


class RoundReport(BaseModel):
    """One round of one engine: when each token arrived, and the stages' clocks around it."""

    model_config = ConfigDict(frozen=True)

    submitted_seconds: float
    token_seconds: tuple[tuple[float, ...], ...]
    """Arrival of every token, by request."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """Token ids of every answer, by request."""
    engine_cpu_seconds: float
    stages: tuple[StageSeconds, ...]
    """The whole round, by stage."""
    steady_stages: tuple[StageSeconds, ...] | None
    """The part in which every request was decoding; None if there was none."""

    @property
    def finished_seconds(self) -> float:
        """When the last token arrived."""
        return max(times[-1] for times in self.token_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, from the first submission to the last token."""
        total = sum(len(times) for times in self.token_seconds)
        return total / (self.finished_seconds - self.submitted_seconds)

    @property
    def mean_ttft_seconds(self) -> float:
        """Mean time to the first token."""
        return mean(times[0] - self.submitted_seconds for times in self.token_seconds)

    @property
    def mean_tpot_seconds(self) -> float:
        """Mean over the requests of (last token - first token) / (tokens - 1)."""
        return mean((times[-1] - times[0]) / (len(times) - 1) for times in self.token_seconds if len(times) > 1)


def ran_together(reports: Sequence[RoundReport]) -> bool:
    """Whether all of them ran at the same time at least once."""
    begin, end = _common_window(reports)
    return begin < end


def _common_window(reports: Sequence[RoundReport]) -> tuple[float, float]:
    """From the last submission to the first end."""
    return max(report.submitted_seconds for report in reports), min(report.finished_seconds for report in reports)


def common_window_tokens_per_second(reports: Sequence[RoundReport]) -> float:
    """Tokens per second of concurrent engines, counted only while all of them ran.

    Raises:
        ValueError: they did not overlap.
    """
    begin, end = _common_window(reports)
    if end <= begin:
        raise ValueError("the engines did not run at the same time")
    inside = sum(begin < moment <= end for report in reports for times in report.token_seconds for moment in times)
    return inside / (end - begin)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of pairs that were measured right after each other."""
    return median(top / bottom for top, bottom in zip(numerators, denominators, strict=True))
