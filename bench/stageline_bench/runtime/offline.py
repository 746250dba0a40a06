"""`bench offline`: one group of P stages, several rounds, every round's figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stageline_bench.runtime.group.bench_group import GroupShape, bench_group
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.record.results import Result, round_figures, this_machine, today


def run_offline(
    model_dir: Path,
    shape: GroupShape,
    workload: Workload,
    *,
    rounds: int,
    directory: Path,
    say: Callable[[str], None],
) -> Result:
    """A round to warm up, then `rounds` that count; each draws its prompts from its own seed."""
    machine = this_machine()
    measured = []
    with bench_group(shape, model_dir, directory) as group:
        group.run(workload)
        for index in range(rounds):
            figures = round_figures(group.run(workload.with_seed(workload.seed + index)))
            measured.append(figures)
            say(f"round {index + 1}/{rounds}: {_line(figures)}")
    return Result(
        program="offline",
        date=today(),
        machine=machine,
        parameters=_parameters(shape, workload),
        rounds=measured,
        targets=[],
    )


def _line(figures: dict[str, Any]) -> str:
    whole = figures["whole"]
    return (
        f"{figures['tokens_per_second']:.1f} tok/s, "
        f"bubble {whole['bubble_ratio']:.3f}, bottleneck share {whole['bottleneck_share']:.3f}, "
        f"imbalance {whole['imbalance']:.3f}, host {whole['host_seconds_per_step'] * 1e3:.2f} ms/step, "
        f"TTFT {figures['mean_ttft_seconds'] * 1e3:.0f} ms, TPOT {figures['mean_tpot_seconds'] * 1e3:.1f} ms"
    )


def _parameters(shape: GroupShape, workload: Workload) -> dict[str, Any]:
    return {
        "stages": len(shape.stage_cores),
        "stage_cores": list(shape.stage_cores),
        "engine_cores": list(shape.engine_cores) or "any",
        "dtype": shape.dtype,
        "max_model_len": shape.max_model_len,
        "max_num_seqs": shape.max_num_seqs,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "requests": workload.requests,
        "input_tokens": workload.input_tokens,
        "output_tokens": workload.output_tokens,
        "seed": workload.seed,
    }
