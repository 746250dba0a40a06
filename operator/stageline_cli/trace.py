"""`stageline trace`: how every stage of a running group spends its time, as a Perfetto trace and a table."""

from pathlib import Path
from typing import Final

import click
import httpx
from pydantic import ValidationError

from stageline_api.endpoints import Endpoints
from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_local.session.instance import default_state_root, running_instances
from stageline_runtime.trace.collect import collect
from stageline_runtime.trace.lanes import StageTimeline, Window, common_window
from stageline_runtime.trace.perfetto import perfetto_json
from stageline_runtime.trace.summary import summarize, summary_lines

_ENDPOINTS_FILE: Final = "endpoints.json"


@click.command()
@click.argument("name", required=False)
@click.option("--engine-url", help="Engine of the group, instead of NAME: http://STAGE-0-POD:8002.")
@click.option("--group", type=click.IntRange(min=0), help="Group of NAME. Default: the first ready one.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds to trace; 0 reads the stages' last 4096 plans.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("trace.json"),
    show_default=True,
    help="The trace, for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="As given to `up`. Default: ~/.local/state/stageline."
)
def trace(
    name: str | None,
    engine_url: str | None,
    group: int | None,
    seconds: float,
    output: Path,
    state_dir: Path | None,
) -> None:
    """Trace the stages of the model NAME that `stageline up` serves (by default the only running one)."""
    url = engine_url.rstrip("/") if engine_url else _local_engine(state_dir or default_state_root(), name, group)
    # A proxy of the environment is not meant for stages, whatever address they have.
    with httpx.Client(trust_env=False) as http:
        served, timelines, begin = collect(http, url, seconds)
    window = common_window(timelines)
    if begin is not None:
        window = Window(begin=min(max(window.begin, begin), window.end), end=window.end)
    title = f"{served.served_name}, {served.stage_count} stages, incarnation {served.incarnation}"
    for line in summary_lines(summarize(timelines, window), window):
        click.echo(line)
    for one in timelines:
        _say_limits(one)
    _write(output, perfetto_json(timelines, window, title=title))
    click.echo(f"{output}: open it at https://ui.perfetto.dev")


def _say_limits(one: StageTimeline) -> None:
    if one.missed_steps:
        click.echo(f"stage {one.stage}: {one.missed_steps} plans were overwritten before they were read", err=True)
    if one.error_nanoseconds:
        click.echo(f"stage {one.stage}: its clock is known to within {one.error_nanoseconds / 1e6:.3f} ms")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def _local_engine(state_root: Path, name: str | None, group: int | None) -> str:
    """URL of a local group's engine; raises UserError if none matches."""
    running = [record.name for record in running_instances(state_root)]
    if name is None and len(running) > 1:
        raise UserError(f"several models are up ({', '.join(running)}): name one", USAGE_EXIT_CODE)
    chosen = name if name is not None else next(iter(running), None)
    if chosen is None or chosen not in running:
        what = "nothing is up" if chosen is None else f"{chosen} is not up"
        raise UserError(f"{what} in {state_root}; start it with `stageline up`, or give --engine-url", USAGE_EXIT_CODE)
    groups = _endpoints(state_root / chosen).groups
    for one in groups:
        if one.ready if group is None else one.group == group:
            if one.url:
                return one.url
            raise UserError(f"group {one.group} of {chosen} has no engine now: {one.message}")
    which = "no group is ready" if group is None else f"there is no group {group}"
    reasons = "".join(f"; group {one.group}: {one.message}" for one in groups if one.message)
    raise UserError(f"{chosen}: {which}{reasons}")


def _endpoints(directory: Path) -> Endpoints:
    path = directory / _ENDPOINTS_FILE
    try:
        return Endpoints.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{path} can't be read: {type(error).__name__}") from error
