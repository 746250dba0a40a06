"""Changes between two readings: shares of stages, quantiles of histograms, rates. Pure.

A counter that decreased was reset by a restart of its process; the result over such an interval is None.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from stageline_cli.on_call.facts.facts import PipelineFacts, Quantiles, StageActivity, TrafficFacts
from stageline_cli.on_call.facts.samples import Samples
from stageline_gateway.telemetry import metric_names as gateway
from stageline_runtime import metric_names as runtime

_Key = TypeVar("_Key")


def stage_activity(earlier: Samples, later: Samples) -> StageActivity | None:
    """One stage's activity; None without two readings of the same process."""
    seconds = _growth(earlier, later, runtime.STAGE_WALL.name)
    if not seconds:
        return None
    busy = _growths(earlier, later, runtime.STAGE_BUSY.name, "kind")
    wait = _growths(earlier, later, runtime.STAGE_WAIT.name, "reason")
    idle = _growth(earlier, later, runtime.STAGE_IDLE.name)
    if busy is None or wait is None or idle is None:
        return None
    total_busy, total_wait, dummy = sum(busy.values()), sum(wait.values()), busy.get("dummy", 0.0)
    engaged = total_busy + total_wait
    # The sum of the three states, because the samples of one scrape are not taken at exactly the same time.
    wall = engaged + idle or seconds
    return StageActivity(
        seconds=seconds,
        busy_share=total_busy / wall,
        wait_share=total_wait / wall,
        idle_share=idle / wall,
        dummy_share=dummy / wall,
        wait_share_by_reason={reason: spent / wall for reason, spent in wait.items() if spent > 0},
        bubble=(total_wait + dummy) / engaged if engaged > 0 else None,
    )


def pipeline_facts(stages: Mapping[int, StageActivity]) -> PipelineFacts | None:
    """The combined activity of a group's stages; None without any."""
    if not stages:
        return None
    busy = {stage: one.busy_share for stage, one in stages.items()}
    engaged = sum(one.busy_share + one.wait_share for one in stages.values())
    wasted = sum(one.wait_share + one.dummy_share for one in stages.values())
    mean_busy = sum(busy.values()) / len(busy)
    slowest = max(busy, key=lambda stage: busy[stage])
    works = mean_busy > 0
    return PipelineFacts(
        bubble=wasted / engaged if engaged > 0 else None,
        bottleneck_stage=slowest if works else None,
        bottleneck_share=busy[slowest] if works else None,
        imbalance=busy[slowest] / mean_busy if works else None,
    )


def traffic_facts(pairs: Sequence[tuple[Samples, Samples]], seconds: float, served_name: str) -> TrafficFacts | None:
    """One model's traffic at the gateways; `pairs` are an earlier and a later scrape of each gateway."""
    if seconds <= 0 or not pairs:
        return None
    label = {"model_name": served_name}
    codes = [_growths(one, other, gateway.REQUESTS.name, "code", **label) for one, other in pairs]
    tokens = [_growth(one, other, gateway.GENERATION_TOKENS.name, **label) for one, other in pairs]
    broken = [_growth(one, other, gateway.BROKEN_ANSWERS.name, **label) for one, other in pairs]
    if None in codes or None in tokens or None in broken:
        return None
    count_of = _summed([one for one in codes if one is not None])
    requests = sum(count_of.values())
    failed = sum(count for code, count in count_of.items() if code.startswith("5")) + sum(one or 0.0 for one in broken)
    return TrafficFacts(
        seconds=seconds,
        requests_per_second=requests / seconds,
        error_ratio=min(1.0, failed / requests) if requests else None,
        tokens_per_second=sum(one or 0.0 for one in tokens) / seconds,
        in_flight=int(sum(one.total(gateway.IN_FLIGHT.name, **label) for _, one in pairs)),
        queued=int(sum(one.total(gateway.QUEUED.name, **label) for _, one in pairs)),
        first_token=_quantiles(pairs, gateway.TIME_TO_FIRST_TOKEN.name, label),
        output_token=_quantiles(pairs, gateway.TIME_PER_OUTPUT_TOKEN.name, label),
    )


def draft_figures(earlier: Samples, later: Samples) -> tuple[float | None, float | None]:
    """Acceptance rate of drafts, and output tokens per verified row; None without drafts or after a counter reset.

    An engine of another release may report drafts but no rows.
    """
    drafted = _growth(earlier, later, runtime.DRAFT_TOKENS.name)
    held = _growth(earlier, later, runtime.ACCEPTED_TOKENS.name)
    rows = _growth(earlier, later, runtime.DRAFTED_ROWS.name)
    if not drafted or held is None:
        return None, None
    return held / drafted, 1 + held / rows if rows else None


def counter_rate(earlier: Samples, later: Samples, name: str, seconds: float) -> float | None:
    """Growth of a counter per second; None after a reset."""
    grown = _growth(earlier, later, name) if seconds > 0 and later.value(name) is not None else None
    return None if grown is None else grown / seconds


def histogram_quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """The value below which `share` of the samples lie, by linear interpolation in a bucket; None without samples.

    `buckets` are cumulative counts by upper bound. In the last, open bucket the result is the highest finite bound, as
    in PromQL's `histogram_quantile`.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = share * buckets[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted:
            if math.isinf(bound):
                return lower
            inside = buckets[bound] - below
            return bound if inside <= 0 else lower + (bound - lower) * (wanted - below) / inside
        lower, below = bound, buckets[bound]
    return lower


def _quantiles(pairs: Sequence[tuple[Samples, Samples]], name: str, label: Mapping[str, str]) -> Quantiles | None:
    grown: list[dict[float, float]] = []
    for earlier, later in pairs:
        before, now = earlier.buckets(name, **label), later.buckets(name, **label)
        grown.append({bound: count - before.get(bound, 0.0) for bound, count in now.items()})
    buckets = _summed(grown)
    if any(buckets[lower] > buckets[upper] or buckets[lower] < 0 for lower, upper in pairwise(sorted(buckets))):
        return None
    p50, p95 = histogram_quantile(0.5, buckets), histogram_quantile(0.95, buckets)
    return None if p50 is None or p95 is None else Quantiles(p50, p95)


def _growth(earlier: Samples, later: Samples, name: str, **labels: str) -> float | None:
    grown = later.total(name, **labels) - earlier.total(name, **labels)
    return grown if grown >= 0 else None


def _growths(earlier: Samples, later: Samples, name: str, label: str, **labels: str) -> dict[str, float] | None:
    before, now = earlier.by_label(name, label, **labels), later.by_label(name, label, **labels)
    grown = {value: count - before.get(value, 0.0) for value, count in now.items()}
    return grown if all(count >= 0 for count in grown.values()) else None


def _summed(parts: Sequence[Mapping[_Key, float]]) -> dict[_Key, float]:
    sums: dict[_Key, float] = {}
    for part in parts:
        for key, count in part.items():
            sums[key] = sums.get(key, 0.0) + count
    return sums
