"""`stageline status`: the state of models, once, as text for people or as JSON for scripts."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import Console, RenderableType

from stageline_cli.on_call.bundle.document import as_json, as_yaml, snapshot_document
from stageline_cli.on_call.facts.facts import Health, Snapshot
from stageline_cli.on_call.facts.scrape import Reading, read_all
from stageline_cli.on_call.facts.snapshot import build_snapshot
from stageline_cli.on_call.sources.choose_source import one_model, open_source, source_options
from stageline_cli.on_call.sources.source import ModelObjects, Source
from stageline_cli.on_call.views.status_view import fleet_view, model_view

PLAIN_WIDTH: Final = 200
"""Columns if the output is no terminal."""
EXIT_DEGRADED: Final = 3
EXIT_DOWN: Final = 4


@dataclass(frozen=True)
class _Format:
    output: str
    name: str | None

    @property
    def is_wide(self) -> bool:
        return self.output == "wide"


@click.command()
@click.argument("model", required=False)
@source_options
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "yaml"]),
    default="table",
    show_default=True,
    help="json and yaml hold every value, with units in the names.",
)
@click.option(
    "--window-seconds",
    type=click.FloatRange(min=0, max=60),
    default=1.0,
    show_default=True,
    help="Seconds between the two readings for rates and shares; 0 reads once and shows none.",
)
@click.option(
    "--exit-code",
    is_flag=True,
    help=f"Exit with {EXIT_DEGRADED} when a model is degraded, {EXIT_DOWN} when one doesn't answer or there is none.",
)
def status(model: str | None, output: str, window_seconds: float, exit_code: bool, **where: Any) -> int:
    """Show all models, or MODEL's groups, stages, states and failures.

    Reads the `stageline up` of this machine if there is one, else the cluster of kubectl's current context.
    """
    with open_source(**where) as source:
        models = source.models(None) if model is None else [one_model(source, model)]
        snapshot = observe_twice(source, models, window_seconds)
    _print(snapshot, _Format(output, model))
    return health_exit_code(snapshot) if exit_code else 0


def observe_twice(source: Source, models: list[ModelObjects], window_seconds: float) -> Snapshot:
    """Facts with the activity of `window_seconds`."""
    earlier = Reading()
    if window_seconds > 0 and any(one.is_up for one in models):
        earlier = read_all(source.http, models)
        if not earlier.is_empty:
            time.sleep(window_seconds)
    # If no pod was reached, a second attempt would fail too, and unreachable pods cost time.
    later = earlier if earlier.problems and earlier.is_empty else read_all(source.http, models)
    return build_snapshot(source.where, models, earlier, later, datetime.now(UTC))


def health_exit_code(snapshot: Snapshot) -> int:
    """0 if every model is healthy; otherwise the worst one decides."""
    healths = {one.health for one in snapshot.models}
    if not healths or healths & {Health.STARTING, Health.DOWN, Health.ENDED}:
        return EXIT_DOWN
    return EXIT_DEGRADED if Health.DEGRADED in healths else 0


def plain_or_terminal() -> Console:
    """A console on stdout; wide if that is a file or a pipe."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _print(snapshot: Snapshot, form: _Format) -> None:
    if form.output in ("json", "yaml"):
        document = snapshot_document(snapshot)
        sys.stdout.write(as_json(document) if form.output == "json" else as_yaml(document))
        return
    console = plain_or_terminal()
    for part in _parts(snapshot, form):
        console.print(part)


def _parts(snapshot: Snapshot, form: _Format) -> Iterator[RenderableType]:
    if form.name is None:
        return fleet_view(snapshot, form.is_wide)
    return model_view(snapshot, snapshot.models[0], form.is_wide)
