"""`bench peers --vllm-engine`: vLLM under Stageline compared with vLLM alone and with Stageline's own runtime.

All three are HTTP servers of one model over two stages and get the same requests at `/v1/completions`. The rate of a
burst counts from the first request sent to the last token read. Poisson arrivals give the time to the first token and
between tokens. The servers' starts alternate, so that other load on the machine affects all. A ratio is the median of
pairs, the n-th start of one over the n-th of the other.

vLLM alone is `vllm serve`'s own server with its own scheduler. Under Stageline it has even microbatches, the state
clock, and our gateway and engine container. So the floors apply to all of these together.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any, Final

from stageline_bench.costs.vllm_clock_cost import clock_step_seconds
from stageline_bench.runtime.group.arrivals import ArrivalLoad, play
from stageline_bench.runtime.peers.peer_bench import STAGELINE, VLLM
from stageline_bench.runtime.peers.served_engines import MODEL_NAME, STAGELINE_VLLM, Servers
from stageline_bench.runtime.record.results import Result, Target, this_machine, today
from stageline_bench.runtime.serve import WARM_UP_SHARE, stream_figures

ENGINES: Final = (STAGELINE_VLLM, VLLM, STAGELINE)
BURSTS: Final = (
    ArrivalLoad(rate=math.inf, requests=16, input_tokens=32, output_tokens=96),
    ArrivalLoad(rate=math.inf, requests=64, input_tokens=32, output_tokens=96),
)
ARRIVALS: Final = ArrivalLoad(rate=4.0, requests=120, input_tokens=64, output_tokens=48)
TRIAL_BURSTS: Final = tuple(replace(one, output_tokens=8) for one in BURSTS)
TRIAL_ARRIVALS: Final = replace(ARRIVALS, requests=8, output_tokens=8)
FLOORS: Final = {16: 1.08, 64: 1.15}
"""Of vLLM under Stageline over vLLM alone, by number of requests of a burst."""
CLOCK_ROWS: Final = 8
"""Rows of the decode that measures the state clock: half of the smaller burst."""
STEP: Final = "decode_step_seconds"
LATENCIES: Final = ("mean_ttft_seconds", "mean_tpot_seconds")


def run_vllm_engine(
    servers: Servers,
    arrivals: ArrivalLoad,
    *,
    starts: int,
    rounds: int,
    say: Callable[[str], None],
    engines: Sequence[str] = ENGINES,
    bursts: Sequence[ArrivalLoad] = BURSTS,
) -> Result:
    """Measure; the first server alternates between starts."""
    machine = this_machine()
    measured: list[dict[str, Any]] = []
    for start in range(starts):
        turn = start % len(engines)
        for engine in (*engines[turn:], *engines[:turn]):
            with servers.running(engine) as url:
                rates = {str(one.requests): _burst_rates(url, one, servers.vocab_size, rounds) for one in bursts}
                step = {STEP: servers.decode_step_seconds(engine)} if engine == STAGELINE_VLLM else {}
                figures = _arrival_figures(url, arrivals, servers.vocab_size)
            measured.append({"start": start, "engine": engine, "rates": rates, **figures, **step})
            shown = ", ".join(f"{requests} requests {median(values):.0f} tok/s" for requests, values in rates.items())
            ttft, tpot = (figures[name] * 1e3 for name in LATENCIES)
            say(f"start {start + 1}/{starts}, {engine}: {shown}, TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms")
    sizes = {f"burst of {one.requests}": f"{one.input_tokens} in, {one.output_tokens} out" for one in bursts}
    return Result(
        program="vllm-engine",
        date=today(),
        machine=machine,
        parameters={
            **servers.parameters(starts),
            "rounds_per_start": rounds,
            **sizes,
            **{f"arrivals {name.replace('_', ' ')}": value for name, value in asdict(arrivals).items()},
        },
        rounds=measured,
        targets=[*vllm_engine_targets(measured), _clock_target(measured)],
    )


def _clock_target(measured: Sequence[dict[str, Any]]) -> Target:
    """The state clock's time in a decode of vLLM's worker, measured alone, over the decode's time."""
    steps = [one[STEP] for one in measured if STEP in one]
    share = round(clock_step_seconds(CLOCK_ROWS) / median(steps), 4) if steps else None
    return Target(name="state clock, share of a decode of the quickest stage", measured=share, at_most=0.01)


def _burst_rates(url: str, burst: ArrivalLoad, vocab_size: int, rounds: int) -> list[float]:
    """Output tokens per second of each round; the first round is a warm-up and doesn't count."""
    rates = []
    for seed in range(rounds + 1):
        began = time.perf_counter()
        asyncio.run(play(url, MODEL_NAME, replace(burst, seed=seed), vocab_size))
        rates.append(round(burst.requests * burst.output_tokens / (time.perf_counter() - began), 2))
    return rates[1:]


def _arrival_figures(url: str, arrivals: ArrivalLoad, vocab_size: int) -> dict[str, float]:
    warm_up = replace(arrivals, requests=max(2, arrivals.requests // WARM_UP_SHARE), seed=arrivals.seed + 1)
    asyncio.run(play(url, MODEL_NAME, warm_up, vocab_size))
    return stream_figures(asyncio.run(play(url, MODEL_NAME, arrivals, vocab_size)), arrivals.output_tokens)


def vllm_engine_targets(measured: Sequence[dict[str, Any]]) -> list[Target]:
    """vLLM under Stageline over vLLM alone: rates of bursts, then latencies of arrivals."""
    targets = []
    for requests, floor in FLOORS.items():
        ours, theirs = (burst_medians(measured, engine, requests) for engine in (STAGELINE_VLLM, VLLM))
        name = f"burst of {requests}: vLLM under Stageline / vLLM"
        targets.append(Target(name=name, measured=_paired(ours, theirs), at_least=floor))
    for latency in LATENCIES:
        ours, theirs = ([one[latency] for one in measured if one["engine"] == engine] for engine in ENGINES[:2])
        name = f"{latency.split('_')[1].upper()} of arrivals: vLLM under Stageline / vLLM"
        targets.append(Target(name=name, measured=_paired(ours, theirs), at_most=1.0))
    return targets


def burst_medians(measured: Sequence[dict[str, Any]], engine: str, requests: int) -> list[float]:
    """tok/s of one server's bursts: the median of each start, in the order of the starts."""
    key = str(requests)
    return [median(one["rates"][key]) for one in measured if one["engine"] == engine and key in one["rates"]]


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    if not ours or len(ours) != len(theirs):
        return None
    return round(median(one / other for one, other in zip(ours, theirs, strict=True)), 3)
