"""`python -m stageline_bench.gateway`: latency that the gateway adds, and its throughput per core compared with nginx.

Needs two cores: one for the relay, one for the synthetic engine and the clients. Loads at 25 tokens a second are
measured through the gateway and directly. The cost of one more token varies by a quarter with the memory layout of a
process. So it is the median over freshly started processes, of paced streams of two lengths through the same process.
The same holds for the cost of a stream when streams arrive faster than a core relays them. A token's share of the
gateway's idle work is counted as its own.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Final

import click

from stageline_api.errors import UserError
from stageline_bench.benchmark_program import run_benchmark
from stageline_bench.gateway import relays
from stageline_bench.gateway.figures import CLIENT_CORE, measure
from stageline_bench.gateway.processes import python_module, started
from stageline_bench.gateway.report import (
    TARGET_CONCURRENT,
    result_of,
    token_cost,
    update_page,
    write_result,
)
from stageline_bench.page_section import EXISTING_PAGE

PACED: Final[dict[str, Any]] = {"tokens": 25, "tokens_per_second": 25.0}
LONG_TOKENS: Final = 125
"""The extra cost of longer streams gives the cost of a token."""
STARTS: Final = 5
"""Starts of a gateway and of nginx, alternately, for the cost of a token."""
SATURATED_STARTS: Final = 4
"""Starts of a saturated gateway."""
SATURATING: Final[dict[str, Any]] = {"tokens": 50, "tokens_per_second": 1000.0}


def run(concurrencies: tuple[int, ...], seconds: float, directory: Path) -> dict[str, Any]:
    """All measurements, each number of streams and start with its own processes."""
    load_average = os.getloadavg()[0]
    engine_command = python_module("stageline_bench.gateway.synthetic_engine")
    with started(engine_command, CLIENT_CORE, directory / "engine.log") as engine:
        assert engine.stdout is not None
        engine_port = int(engine.stdout.readline())
        paced = [one for number in concurrencies for one in _paced(engine_port, number, seconds, directory)]
        tokens = _tokens(engine_port, seconds, directory)
        saturated = _saturated(engine_port, seconds, directory)
    return result_of(paced, saturated, tokens, load_average)


def _paced(engine_port: int, concurrent: int, seconds: float, directory: Path) -> list[dict[str, Any]]:
    load = PACED | {"concurrent": concurrent, "seconds": seconds}
    direct = _say(measure(relays.direct(engine_port), directory, **load))
    with relays.gateway(engine_port, relays.free_port(), directory) as relay:
        _warm_up(relay, directory)
        return [direct, _say(measure(relay, directory, **load))]


def _tokens(engine_port: int, seconds: float, directory: Path) -> list[dict[str, Any]]:
    """Cost of one more token in each relay, once per start."""
    found = []
    for start in range(STARTS):
        relay_of = (relays.gateway, relays.nginx) if start % 2 else (relays.nginx, relays.gateway)
        for open_relay in relay_of:
            with open_relay(engine_port, relays.free_port(), directory) as relay:
                if relay is not None:
                    _warm_up(relay, directory)
                    found.append(_say(_of_two_lengths(relay, seconds, directory, is_long_first=start % 4 > 1)))
    return found


def _of_two_lengths(relay: relays.Relay, seconds: float, directory: Path, *, is_long_first: bool) -> dict[str, Any]:
    load = PACED | {"concurrent": TARGET_CONCURRENT}
    loads = [load | {"seconds": seconds / 2}, load | {"tokens": LONG_TOKENS, "seconds": seconds}]
    measured = [measure(relay, directory, **one) for one in (loads[::-1] if is_long_first else loads)]
    return token_cost(*sorted(measured, key=lambda one: int(one["tokens"])))


def _saturated(engine_port: int, seconds: float, directory: Path) -> list[dict[str, Any]]:
    load = SATURATING | {"seconds": seconds / 2, "concurrent": TARGET_CONCURRENT}
    found = []
    for open_relay in (relays.nginx, *[relays.gateway] * SATURATED_STARTS):
        with open_relay(engine_port, relays.free_port(), directory) as relay:
            if relay is not None:
                _warm_up(relay, directory)
                found.append(_say(measure(relay, directory, **load)))
    return found


def _warm_up(relay: relays.Relay, directory: Path) -> None:
    """Run everything once before it is measured."""
    measure(relay, directory, concurrent=TARGET_CONCURRENT, seconds=3, **PACED)


def _say(figures: dict[str, Any]) -> dict[str, Any]:
    click.echo(figures)
    return figures


@click.command()
@click.option("--concurrent", multiple=True, type=click.IntRange(1), default=(1, 64, 512), show_default=True)
@click.option("--seconds", type=click.FloatRange(2), default=16.0, show_default=True, help="Of each load.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("bench/results"), show_default=True)
@click.option("--page", type=EXISTING_PAGE, help="Markdown page whose table is replaced.")
def bench(concurrent: tuple[int, ...], seconds: float, results: Path, page: Path | None) -> None:
    """Measure the gateway on this machine, which should be otherwise idle."""
    if len(os.sched_getaffinity(0)) < 2:
        raise UserError("The benchmark needs two cores: one for what relays, one for engine and clients.")
    with tempfile.TemporaryDirectory() as scratch:
        result = run(concurrent, seconds, Path(scratch))
    click.echo(f"wrote {write_result(result, results)}")
    for target in result["targets"]:
        click.echo(f"{target['name']}: {target['measured']} ({'met' if target['met'] else 'NOT met'})")
    if page is not None:
        update_page(page, result)


if __name__ == "__main__":
    run_benchmark(bench)
