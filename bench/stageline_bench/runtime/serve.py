"""`bench serve`: the same Poisson arrivals at Stageline's gateway and at vLLM's server, starts interleaved.

Each start plays the load once to warm up on a tenth of it, then once for real. Reported are mean and 99th percentile of
the time to the first token (TTFT) and of the mean time between tokens (TPOT) of each answer.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import mean, median, quantiles
from typing import Any

from stageline_bench.runtime.group.arrivals import ArrivalLoad, StreamTimes, play
from stageline_bench.runtime.peers.served_engines import ENGINES, MODEL_NAME, Servers
from stageline_bench.runtime.record.results import Result, Target, this_machine, today

WARM_UP_SHARE = 10
MEASURES = ("mean_ttft_seconds", "p99_ttft_seconds", "mean_tpot_seconds", "p99_tpot_seconds")


def run_serve(servers: Servers, load: ArrivalLoad, *, starts: int, say: Callable[[str], None]) -> Result:
    """Measure; the first server alternates between starts."""
    machine = this_machine()
    measured: list[dict[str, Any]] = []
    warm_up = replace(load, requests=max(2, load.requests // WARM_UP_SHARE), seed=load.seed + 1)
    for start in range(starts):
        for engine in ENGINES if start % 2 == 0 else reversed(ENGINES):
            with servers.running(engine) as url:
                asyncio.run(play(url, MODEL_NAME, warm_up, servers.vocab_size))
                streams = asyncio.run(play(url, MODEL_NAME, load, servers.vocab_size))
            figures = stream_figures(streams, load.output_tokens)
            measured.append({"start": start, "engine": engine, **figures})
            say(
                f"start {start + 1}/{starts}, {engine}: TTFT mean {figures['mean_ttft_seconds'] * 1e3:.0f} ms, "
                f"TPOT mean {figures['mean_tpot_seconds'] * 1e3:.1f} ms"
            )
    return Result(
        program="serve",
        date=today(),
        machine=machine,
        parameters={
            **servers.parameters(starts),
            **{name.replace("_", " "): value for name, value in asdict(load).items()},
        },
        rounds=measured,
        targets=serve_targets(measured),
    )


def stream_figures(streams: Sequence[StreamTimes], output_tokens: int) -> dict[str, float]:
    """Mean and 99th percentile of TTFT and TPOT, in seconds."""
    first = [one.first_token_seconds for one in streams]
    between = [one.rest_seconds / (output_tokens - 1) for one in streams]
    values = (mean(first), _p99(first), mean(between), _p99(between))
    return {name: round(value, 5) for name, value in zip(MEASURES, values, strict=True)}


def serve_targets(measured: Sequence[dict[str, Any]]) -> list[Target]:
    """Stageline's mean TTFT and TPOT over vLLM's, medians of starts: below 1 is faster."""
    targets = []
    for name in ("mean_ttft_seconds", "mean_tpot_seconds"):
        ours, theirs = ([one[name] for one in measured if one["engine"] == engine] for engine in ENGINES)
        ratio = round(median(one / other for one, other in zip(ours, theirs, strict=True)), 3)
        targets.append(Target(name=f"{name.split('_')[1].upper()}: Stageline / vLLM", measured=ratio, at_most=1.0))
    return targets


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]
