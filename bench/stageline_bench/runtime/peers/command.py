"""Programs of `stageline bench` that compare Stageline with another engine: vLLM, Hugging Face, llama.cpp.

Engines start alternately, each in its own environment; each program prints progress and writes one result.
"""

import tempfile
from pathlib import Path
from typing import Any

import click

from stageline_bench.laptop import llama_environment
from stageline_bench.laptop.comparison import LaptopBench
from stageline_bench.runtime.group.arrivals import ArrivalLoad
from stageline_bench.runtime.options import (
    common,
    core_list,
    keep,
    model_options,
    numbers,
    prepared_model,
    server_options,
)
from stageline_bench.runtime.peers.peer_bench import PeerBench
from stageline_bench.runtime.peers.peer_environment import DIRECTORY, VLLM_DRIVER, ensure_environment
from stageline_bench.runtime.peers.served_engines import Servers
from stageline_bench.runtime.peers.speculation_peers import SpeculationPeers
from stageline_bench.runtime.peers.vllm_engine import ARRIVALS, TRIAL_ARRIVALS, TRIAL_BURSTS, run_vllm_engine
from stageline_bench.runtime.prefix_reuse import run_prefix_reuse
from stageline_bench.runtime.record.results import result_of_today
from stageline_bench.runtime.serve import run_serve


@click.command("speculation-peers")
@model_options
@common
@click.option("--core", type=click.IntRange(0), default=0, help="Of all three; two stages of vLLM take the next.")
@click.option("--rounds", type=click.IntRange(1), default=3)
@click.option("--environment", type=click.Path(path_type=Path), default=DIRECTORY, help="vLLM's own.")
def speculation_peers(
    source: str, cache_dir: Path, results: Path, page: Path | None, environment: Path, rounds: int, **rest: Any
) -> None:
    """Speedup by lookup here, in Hugging Face's generate and in vLLM: one request, one core."""
    python = ensure_environment(environment, click.echo)
    with tempfile.TemporaryDirectory() as scratch:
        peers = SpeculationPeers(prepared_model(source, cache_dir), python, directory=Path(scratch), **rest)
        keep(peers.run(rounds, click.echo), results, page)


@click.command()
@model_options
@common
@click.option("--cores", callback=core_list, default="0,1")
@click.option(
    "--starts", type=click.IntRange(1), show_default="5, with --vllm-engine 3", help="Of each engine at each P."
)
@click.option("--rounds", type=click.IntRange(1), default=3, help="Rounds per workload and start.")
@click.option("--stages", callback=numbers, default="1,2", help="Pipeline lengths to compare.")
@click.option("--add", is_flag=True, help="Add the starts to today's result instead of replacing it.")
@click.option("--vllm-engine", is_flag=True, help="Over HTTP: vLLM under Stageline against vLLM by itself, P = 2.")
@click.option("--trial", is_flag=True, help="With --vllm-engine: a few requests, to see that it runs; kept nowhere.")
@click.option("--environment", type=click.Path(path_type=Path), default=DIRECTORY, help="vLLM's own.")
@click.option("--driver", type=click.Path(path_type=Path), default=VLLM_DRIVER)
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
            servers = Servers(prepared_model(source, cache_dir), python, Path(scratch), dtype=rest["dtype"], stages=2)
            if trial:
                run_vllm_engine(servers, TRIAL_ARRIVALS, bursts=TRIAL_BURSTS, starts=1, rounds=1, say=click.echo)
                return
            result = run_vllm_engine(servers, ARRIVALS, starts=starts or 3, rounds=rest["rounds"], say=click.echo)
            keep(result, results, page)
            return
        peer = PeerBench(prepared_model(source, cache_dir), python, driver, directory=Path(scratch), **rest)
        earlier = result_of_today("peers", results) if add else None
        keep(peer.run(starts or 5, stages, click.echo, earlier), results, page)


@click.command()
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
    """Poisson arrivals over HTTP: time to first token and between tokens, compared with vLLM's server."""
    python = ensure_environment(environment, click.echo)
    load = ArrivalLoad(**{name: rest.pop(name) for name in ("rate", "requests", "input_tokens", "output_tokens")})
    model = prepared_model(source, cache_dir)
    with tempfile.TemporaryDirectory() as scratch:
        servers = Servers(model, python, Path(scratch), dtype=dtype, stages=rest.pop("stages"))
        keep(run_serve(servers, load, say=click.echo, **rest), results, page)


@click.command()
@model_options
@common
@server_options
def prefix_reuse(
    source: str, cache_dir: Path, results: Path, page: Path | None, environment: Path, dtype: str, **rest: Any
) -> None:
    """Chats and a shared system prompt over HTTP, compared with vLLM's server: savings of both prefix caches."""
    python = ensure_environment(environment, click.echo)
    model = prepared_model(source, cache_dir)
    with tempfile.TemporaryDirectory() as scratch:
        servers = Servers(model, python, Path(scratch), dtype=dtype, stages=rest.pop("stages"))
        keep(run_prefix_reuse(servers, say=click.echo, **rest), results, page)


@click.command()
@model_options
@common
@click.option("--cores", callback=core_list, default="0,1", help="Of both; a stage, or a thread, on each.")
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
        model = prepared_model(source, cache_dir)
        peers = LaptopBench(model_dir=model, gguf=gguf, llama_python=python, directory=Path(scratch), **rest)
        keep(peers.run(starts, click.echo), results, page)
