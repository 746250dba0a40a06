"""`stageline bench`: offline, pipeline, paced, ranks, speculation, and comparisons with other engines.

Each prints progress and writes one result.
"""

import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from stageline_api.errors import UserError
from stageline_bench.runtime.draft_model import run_draft_model
from stageline_bench.runtime.group.bench_group import MAX_MODEL_LEN, GroupShape
from stageline_bench.runtime.group.workload import INPUT_TOKENS, Workload
from stageline_bench.runtime.offline import run_offline
from stageline_bench.runtime.options import (
    check_context,
    common,
    core_list,
    keep,
    model_options,
    numbers,
    prepared_model,
    seconds_of,
)
from stageline_bench.runtime.paced import run_paced
from stageline_bench.runtime.peers.command import laptop, peers, prefix_reuse, serve, speculation_peers
from stageline_bench.runtime.peers.peer_environment import DIRECTORY, ensure_environment
from stageline_bench.runtime.pipeline import run_pipeline
from stageline_bench.runtime.ranks import RankBench, missed
from stageline_bench.runtime.speculation import run_paced_speculation, run_speculation


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def bench() -> None:
    """Measure the runtime on this machine, which should be otherwise idle."""
    # Without this, SIGTERM would leave the benchmark's processes running.
    signal.signal(signal.SIGTERM, _stop)


@bench.command()
@model_options
@common
@click.option("--stage-cores", callback=core_list, default="0,1", help="One core per stage; as many stages as cores.")
@click.option("--engine-cores", callback=core_list, default="", help="Cores of the engine; empty lets it float.")
@click.option("--requests", type=click.IntRange(1), default=16)
@click.option("--input-tokens", type=click.IntRange(1), default=32)
@click.option("--output-tokens", type=click.IntRange(2), default=96)
@click.option("--max-model-len", type=click.IntRange(2), default=640)
@click.option("--max-num-seqs", type=click.IntRange(1), default=64)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=512)
@click.option("--seed", type=int, default=0)
@click.option("--rounds", type=click.IntRange(1), default=5)
def offline(
    source: str,
    cache_dir: Path,
    results: Path,
    page: Path | None,
    rounds: int,
    requests: int,
    seed: int,
    **rest: Any,
) -> None:
    """One group, without HTTP: rate, bubble, bottleneck share, imbalance and host overhead of every round."""
    sizes = {name: rest.pop(name) for name in ("input_tokens", "output_tokens")}
    check_context(**sizes, max_model_len=rest["max_model_len"])
    shape = GroupShape(name="offline", **rest)
    workload = Workload(name="offline", requests=requests, seed=seed, **sizes)
    with tempfile.TemporaryDirectory() as scratch:
        model = prepared_model(source, cache_dir)
        directory = Path(scratch)
        result = run_offline(model, shape, workload, rounds=rounds, directory=directory, say=click.echo)
        keep(result, results, page)


@bench.command()
@model_options
@common
@click.option("--cores", callback=core_list, default="0,1")
@click.option("--requests-per-core", type=click.IntRange(1), default=8)
@click.option("--starts", type=click.IntRange(1), default=3)
@click.option("--rounds", type=click.IntRange(1), default=5, help="Rounds per start.")
def pipeline(
    source: str, cache_dir: Path, results: Path, page: Path | None, cores: tuple[int, ...], **rest: Any
) -> None:
    """P = 2 compared with two concurrent engines (the ceiling) and with one alone, on two cores."""
    if len(cores) != 2:
        raise click.BadParameter("give two cores", param_hint="--cores")
    with tempfile.TemporaryDirectory() as scratch:
        model = prepared_model(source, cache_dir)
        result = run_pipeline(model, cores=(cores[0], cores[1]), directory=Path(scratch), say=click.echo, **rest)
        keep(result, results, page)


@bench.command()
@common
@click.option("--stage-cores", callback=core_list, default="0,1", help="One core per stage; as many stages as cores.")
@click.option("--requests", type=click.IntRange(1), default=16)
@click.option("--output-tokens", type=click.IntRange(2), default=96)
@click.option("--seconds-per-step", type=click.FloatRange(0), default=0.02, help="About SmolLM2's half at 8 rows.")
@click.option("--seconds-per-token", type=click.FloatRange(0), default=0.0)
@click.option("--rounds", type=click.IntRange(1), default=5)
def paced(results: Path, page: Path | None, **rest: Any) -> None:
    """The bubble of scheduler and transport alone: stages wait a fixed time instead of computing."""
    check_context(INPUT_TOKENS, rest["output_tokens"], MAX_MODEL_LEN)
    with tempfile.TemporaryDirectory() as scratch:
        keep(run_paced(directory=Path(scratch), say=click.echo, **rest), results, page)


@bench.command()
@common
@click.option("--cores", callback=core_list, default="0,1", help="One core per rank.")
@click.option("--rounds", type=click.IntRange(1), default=5)
@click.option("--starts", type=click.IntRange(1), default=2, help="Of either engine, beside vLLM.")
@click.option("--cache-dir", type=click.Path(path_type=Path), default=Path(".stageline/bench-models"))
@click.option("--environment", type=click.Path(path_type=Path), default=DIRECTORY, help="vLLM's own.")
@click.option("--without-vllm", is_flag=True, help="Leave its row out.")
@click.option("--trial", is_flag=True, help="Tiny models, to see that it runs; kept nowhere.")
def ranks(
    results: Path,
    page: Path | None,
    environment: Path,
    *,
    cores: tuple[int, ...],
    without_vllm: bool,
    trial: bool,
    **rest: Any,
) -> None:
    """Two ranks of a stage compared with one, tensor and expert, pinned and not, and with vLLM; exchange times.

    Exits with status 1 and a sentence if a floor is missed.
    """
    if len(cores) != 2:
        raise click.BadParameter("give two cores", param_hint="--cores")
    python = None if without_vllm else ensure_environment(environment, click.echo)
    with tempfile.TemporaryDirectory() as scratch:
        program = RankBench(
            cores=cores, vllm_python=python, directory=Path(scratch), say=click.echo, is_trial=trial, **rest
        )
        result = program.run()
        if trial:
            return
        keep(result, results, page)
    if (sentence := missed(result.targets)) is not None:
        raise UserError(sentence, 1)


@bench.command()
@model_options
@common
@click.option("--stages", callback=numbers, default="1,2", help="Pipeline lengths; those of two have floors.")
@click.option("--cores", callback=core_list, default="0,1", help="One core per stage, in this order.")
@click.option("--rounds", type=click.IntRange(1), default=5)
def speculation(
    source: str,
    cache_dir: Path,
    results: Path,
    page: Path | None,
    stages: tuple[int, ...],
    cores: tuple[int, ...],
    **rest: Any,
) -> None:
    """Drafts by lookup: the same prompts with and without, one request, four and sixteen."""
    if not stages or not 1 <= min(stages) <= max(stages) <= len(cores):
        asked, there = ",".join(map(str, stages)), ",".join(map(str, cores))
        raise click.BadParameter(f"{asked!r} are not pipelines over the cores {there}", param_hint="--stages")
    with tempfile.TemporaryDirectory() as scratch:
        model = prepared_model(source, cache_dir)
        directory = Path(scratch)
        result = run_speculation(model, stages=stages, cores=cores, directory=directory, say=click.echo, **rest)
        keep(result, results, page)


@bench.command("draft-model")
@model_options
@common
@click.option("--cores", callback=core_list, default="0,1", help="One core per stage; as many stages as cores.")
@click.option("--rounds", type=click.IntRange(1), default=5)
def draft_model(source: str, cache_dir: Path, results: Path, page: Path | None, **rest: Any) -> None:
    """Drafts by a model on the last stage: one that mostly agrees, and one that doesn't."""
    with tempfile.TemporaryDirectory() as scratch:
        model = prepared_model(source, cache_dir)
        keep(run_draft_model(model, directory=Path(scratch), say=click.echo, **rest), results, page)


@bench.command("paced-speculation")
@common
@click.option("--stages", callback=numbers, default="4,8", help="Pipeline lengths to measure.")
@click.option("--cores", callback=core_list, default="0,1", help="Dealt out to the stages, which only wait.")
@click.option("--output-tokens", type=click.IntRange(2), default=256)
@click.option("--seconds-per-step", type=click.FloatRange(0), default=0.02)
@click.option(
    "--seconds-per-token", callback=seconds_of, default="0.001,0.0023", help="What a row's tokens may cost, one by one."
)
@click.option("--rounds", type=click.IntRange(1), default=5)
def paced_speculation(results: Path, page: Path | None, **rest: Any) -> None:
    """Drafts of a known acceptance over stages that wait a fixed time, and no drafts."""
    check_context(INPUT_TOKENS, rest["output_tokens"], MAX_MODEL_LEN)
    with tempfile.TemporaryDirectory() as scratch:
        keep(run_paced_speculation(directory=Path(scratch), say=click.echo, **rest), results, page)


for beside_others in (peers, speculation_peers, serve, prefix_reuse, laptop):
    bench.add_command(beside_others)
