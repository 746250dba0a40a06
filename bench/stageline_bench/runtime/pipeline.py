"""`make bench`: the pipeline compared with the ceiling of its two cores and with one stage alone.

A round measures the three right after each other, in an order that rotates between rounds; ratios are taken within a
round, and medians over the rounds. All groups of a start stay alive, idle while another one is measured.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stageline_bench.runtime.group.bench_group import BenchGroup, GroupShape, bench_group, run_together
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.record.figures import common_window_tokens_per_second, median_ratio
from stageline_bench.runtime.record.results import Result, Target, median_of, round_figures, this_machine, today

OF_CEILING_AT_LEAST = 0.9
WEAK_SCALING_AT_LEAST = 1.6
BUBBLE_AT_MOST = 0.15
HOST_SECONDS_AT_MOST = 0.00045


def run_pipeline(
    model_dir: Path,
    *,
    cores: tuple[int, int],
    requests_per_core: int,
    starts: int,
    rounds: int,
    dtype: str,
    directory: Path,
    say: Callable[[str], None],
) -> Result:
    """Measure `starts` times `rounds` rounds."""
    machine = this_machine()
    single = Workload(name="single", requests=requests_per_core)
    double = Workload(name="pipeline", requests=2 * requests_per_core)
    measured: list[dict[str, Any]] = []
    for start in range(starts):
        with ExitStack() as ends:
            first, second, pipeline = (
                ends.enter_context(bench_group(shape, model_dir, directory / f"{start}-{shape.name}"))
                for shape in _shapes(cores, dtype)
            )
            run_together((first, second), single)  # warm-up: graphs, caches, the CPU's clock
            pipeline.run(double)
            for index in range(rounds):
                one = _round(index, (first, second), pipeline, single, double)
                measured.append({"start": start, **one})
                say(f"start {start + 1}/{starts}, round {index + 1}/{rounds}: {_line(one)}")
    return Result(
        program="pipeline",
        date=today(),
        machine=machine,
        parameters={
            "model": "SmolLM2-135M-Instruct",
            "dtype": dtype,
            "cores": list(cores),
            "engine_cores": "with its stage at P = 1, floating over both at P = 2",
            "requests_per_core": requests_per_core,
            "input_tokens": single.input_tokens,
            "output_tokens": single.output_tokens,
            "starts": starts,
            "rounds_per_start": rounds,
        },
        rounds=measured,
        targets=_targets(measured, requests_per_core),
    )


def _shapes(cores: tuple[int, int], dtype: str) -> tuple[GroupShape, GroupShape, GroupShape]:
    """Two single engines, each on one core with its stage, and the pipeline with an engine that floats over
    both cores.
    """
    return (
        GroupShape(name="first", stage_cores=cores[:1], engine_cores=cores[:1], dtype=dtype),
        GroupShape(name="second", stage_cores=cores[1:], engine_cores=cores[1:], dtype=dtype),
        GroupShape(name="pipeline", stage_cores=cores, engine_cores=cores, dtype=dtype),
    )


def _round(
    index: int, singles: Sequence[BenchGroup], pipeline: BenchGroup, single: Workload, double: Workload
) -> dict[str, Any]:
    figures: dict[str, Any] = {}

    def ceiling() -> None:
        reports = run_together(singles, single)
        figures["ceiling_tokens_per_second"] = round(common_window_tokens_per_second(reports), 2)
        figures["ceiling"] = [round_figures(report) for report in reports]

    def piped() -> None:
        figures["pipeline"] = round_figures(pipeline.run(double))

    def alone() -> None:
        figures["alone"] = round_figures(singles[0].run(single))

    parts = [ceiling, piped, alone]
    turn = index % len(parts)
    for part in parts[turn:] + parts[:turn]:
        part()
    return figures


def _line(one: dict[str, Any]) -> str:
    rate = one["pipeline"]["tokens_per_second"]
    return (
        f"ceiling {one['ceiling_tokens_per_second']:.0f} tok/s, P=2 {rate:.0f} tok/s, "
        f"P=1 {one['alone']['tokens_per_second']:.0f} tok/s, bubble {one['pipeline']['whole']['bubble_ratio']:.3f}"
    )


def _targets(measured: list[dict[str, Any]], per_core: int) -> list[Target]:
    ceiling = [one["ceiling_tokens_per_second"] for one in measured]
    piped = [one["pipeline"]["tokens_per_second"] for one in measured]
    alone = [one["alone"]["tokens_per_second"] for one in measured]
    return [
        Target(
            name=f"P = 2 with {2 * per_core} requests / ceiling of two P = 1 with {per_core} each",
            measured=round(median_ratio(piped, ceiling), 3),
            at_least=OF_CEILING_AT_LEAST,
        ),
        Target(
            name=f"weak scaling: P = 2 with {2 * per_core} / P = 1 with {per_core} alone",
            measured=round(median_ratio(piped, alone), 3),
            at_least=WEAK_SCALING_AT_LEAST,
        ),
        Target(
            name=f"bubble of P = 2 with {2 * per_core}, whole round",
            measured=median_of(measured, "pipeline", "whole", "bubble_ratio"),
            at_most=BUBBLE_AT_MOST,
        ),
        Target(
            name=f"host seconds outside the forward per step at {per_core} rows, P = 2, busiest stage",
            measured=median_of(measured, "pipeline", "steady", "host_seconds_per_step"),
            at_most=HOST_SECONDS_AT_MOST,
        ),
        Target(
            name=f"the same at P = 1 with {per_core}",
            measured=median_of(measured, "alone", "steady", "host_seconds_per_step"),
            at_most=HOST_SECONDS_AT_MOST,
        ),
        Target(
            name="busy + wait + idle against wall, largest relative error",
            measured=max(one["pipeline"]["whole"]["clock_error"] for one in measured),
            at_most=0.01,
        ),
    ]
