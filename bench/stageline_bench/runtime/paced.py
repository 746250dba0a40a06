"""The bubble of scheduler and transport with a fixed compute time: paced stages, everything else real."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stageline_bench.runtime.group.bench_group import BenchGroup, GroupShape, bench_group
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.record.results import Result, Target, median_of, round_figures, this_machine, today

STEADY_BUBBLE_AT_MOST = 0.03
BURST_BUBBLE_AT_MOST = 0.10
HIDDEN_SIZE = 576
"""SmolLM2's, so that the hidden tensors on the wire are as large as in the measurements with real compute."""


def run_paced(
    *,
    stage_cores: Sequence[int],
    requests: int,
    output_tokens: int,
    seconds_per_step: float,
    seconds_per_token: float,
    rounds: int,
    directory: Path,
    say: Callable[[str], None],
) -> Result:
    """Measure rounds of one burst each: the whole round gives the burst figure, its middle the steady one."""
    machine = this_machine()
    workload = Workload(name="paced", requests=requests, output_tokens=output_tokens)
    shape = _shape(stage_cores, requests, seconds_per_step, seconds_per_token)
    with bench_group(shape, write_paced_model(directory / "model", len(stage_cores)), directory / "group") as group:
        measured = _rounds(group, workload, rounds, say)
    return Result(
        program="paced",
        date=today(),
        machine=machine,
        parameters={
            "stages": len(stage_cores),
            "stage_cores": list(stage_cores),
            "engine_cores": "any",
            "requests": requests,
            "input_tokens": workload.input_tokens,
            "output_tokens": output_tokens,
            "seconds_per_step": seconds_per_step,
            "seconds_per_token": seconds_per_token,
        },
        rounds=measured,
        targets=_targets(measured, requests),
    )


def _shape(stage_cores: Sequence[int], requests: int, seconds_per_step: float, seconds_per_token: float) -> GroupShape:
    return GroupShape(
        name="paced",
        stage_cores=tuple(stage_cores),
        dtype="bfloat16",
        max_num_seqs=requests,
        stage_command=(
            "-m",
            "stageline_bench.runtime.group.paced_stage",
            str(seconds_per_step),
            str(seconds_per_token),
        ),
    )


def _rounds(group: BenchGroup, workload: Workload, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Figures of each round, after one that warms sockets, imports and caches."""
    group.run(workload)
    measured: list[dict[str, Any]] = []
    for index in range(rounds):
        figures = round_figures(group.run(workload))
        measured.append(figures)
        steady = figures["steady"]["bubble_ratio"] if figures["steady"] else None
        say(f"paced {index + 1}/{rounds}: burst bubble {figures['whole']['bubble_ratio']}, steady {steady}")
    return measured


def _targets(measured: list[dict[str, Any]], requests: int) -> list[Target]:
    return [
        Target(
            name=f"bubble in steady decode, {requests} requests, paced stages",
            measured=median_of(measured, "steady", "bubble_ratio"),
            at_most=STEADY_BUBBLE_AT_MOST,
        ),
        Target(
            name=f"bubble of a burst of {requests}, first submission to last token, paced stages",
            measured=median_of(measured, "whole", "bubble_ratio"),
            at_most=BURST_BUBBLE_AT_MOST,
        ),
    ]


def write_paced_model(directory: Path, num_layers: int) -> Path:
    """A model that is only a config: paced stages read no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": HIDDEN_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
