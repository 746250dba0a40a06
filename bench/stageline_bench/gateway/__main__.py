"""`python -m stageline_bench.gateway`: what the gateway adds, and what a core of it relays beside nginx.

Needs two cores: one for the relay, one for the synthetic engine and the clients. Loads at 25 tokens a second are
measured through the gateway and directly; then streams come faster than a core can relay them, also with two workers on
that core: what a stream costs then is what sharing costs.
"""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import click

from stageline_api.errors import UserError
from stageline_bench.benchmark_program import run_benchmark
from stageline_bench.gateway import relays
from stageline_bench.gateway.figures import CLIENT_CORE, measure
from stageline_bench.gateway.processes import python_module, started
from stageline_bench.gateway.report import TARGET_CONCURRENT, medians, result_of, update_page, write_result
from stageline_bench.page_section import EXISTING_PAGE

PACED: Final[dict[str, Any]] = {"tokens": 25, "tokens_per_second": 25.0}
LONG: Final[dict[str, Any]] = PACED | {"concurrent": TARGET_CONCURRENT, "tokens": 125}
"""What a token costs by itself is what longer streams cost more."""
PAIRS: Final = 4
"""Of saturated loads on a gateway of one process and on one of two, by turns and each first as often."""
SATURATING: Final[dict[str, Any]] = {"concurrent": 64, "tokens": 50, "tokens_per_second": 1000.0}


def run(concurrencies: tuple[int, ...], seconds: float, directory: Path) -> dict[str, Any]:
    """All measurements, a fresh gateway for each number of streams."""
    load_average = os.getloadavg()[0]
    paced: list[dict[str, Any]] = []
    saturated: list[dict[str, Any]] = []
    long: list[dict[str, Any]] = []
    engine_command = python_module("stageline_bench.gateway.synthetic_engine")
    with started(engine_command, CLIENT_CORE, directory / "engine.log") as engine:
        assert engine.stdout is not None
        engine_port = int(engine.stdout.readline())
        for concurrent in concurrencies:
            paced.append(
                _say(measure(relays.direct(engine_port), directory, concurrent=concurrent, seconds=seconds, **PACED))
            )
            with relays.gateway(engine_port, relays.free_port(), directory) as relay:
                measure(
                    relay, directory, concurrent=8, seconds=2, **PACED
                )  # so that nothing is done for the first time
                paced.append(_say(measure(relay, directory, concurrent=concurrent, seconds=seconds, **PACED)))
        with relays.gateway(engine_port, relays.free_port(), directory) as relay:
            measure(relay, directory, concurrent=8, seconds=2, **PACED)
            long.append(_say(measure(relay, directory, seconds=seconds, **LONG)))
        with ExitStack() as stack:
            alone, by_two, nginx = [
                stack.enter_context(relays.gateway(engine_port, relays.free_port(), directory)),
                stack.enter_context(relays.gateway(engine_port, relays.free_port(), directory, workers=2)),
                stack.enter_context(relays.nginx(engine_port, relays.free_port(), directory)),
            ]
            if nginx is not None:
                saturated.append(_say(measure(nginx, directory, seconds=seconds / 2, **SATURATING)))
            for pair in range(PAIRS):
                for one in (alone, by_two) if pair % 2 else (by_two, alone):
                    saturated.append(_say(measure(one, directory, seconds=seconds / 2, **SATURATING)))
    return result_of(paced, medians(saturated), long, load_average)


def _say(figures: dict[str, Any]) -> dict[str, Any]:
    click.echo(figures)
    return figures


@click.command()
@click.option("--concurrent", multiple=True, type=click.IntRange(1), default=(1, 64, 512), show_default=True)
@click.option("--seconds", type=click.FloatRange(2), default=16.0, show_default=True, help="Of each load.")
@click.option("--results", type=click.Path(path_type=Path), default=Path("bench/results"), show_default=True)
@click.option("--page", type=EXISTING_PAGE, help="Markdown page whose table is replaced.")
def bench(concurrent: tuple[int, ...], seconds: float, results: Path, page: Path | None) -> None:
    """Measure the gateway on this machine. Nothing else should run on it meanwhile."""
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
