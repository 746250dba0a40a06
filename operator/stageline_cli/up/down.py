"""`stageline down`: stop `stageline up` gracefully, and report the result."""

import os
import signal
import time
from pathlib import Path
from typing import Final

import click

from stageline_api.errors import UserError
from stageline_api.manifests.manifest_loader import load_one_model
from stageline_local.session.instance import InstanceRecord, default_state_root, running_instances

_LOOK_SECONDS: Final = 0.05


@click.command()
@click.argument("target", required=False, metavar="[NAME|FILE]")
@click.option("--all", "end_all", is_flag=True, help="Stop every model that is up.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="As given to `up`. Default: ~/.local/state/stageline."
)
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="Seconds to wait for running answers and processes.",
)
def down(target: str | None, end_all: bool, state_dir: Path | None, timeout_seconds: float) -> int:
    """Stop the model called NAME, or the one in FILE; without either, the only one that is up."""
    running = running_instances(state_dir or default_state_root())
    chosen = _choose(running, target, end_all)
    if not chosen:
        click.echo("nothing is up" if target is None else f"{_name_of(target)} is not up")
        return 0
    for record in chosen:
        _end(record, timeout_seconds)
        click.echo(f"{record.name} ended (pid {record.pid}, {record.url})")
    return 0


def _choose(running: list[InstanceRecord], target: str | None, end_all: bool) -> list[InstanceRecord]:
    if end_all:
        return running
    if target is not None:
        name = _name_of(target)
        return [record for record in running if record.name == name]
    if len(running) > 1:
        names = ", ".join(record.name for record in running)
        raise UserError(f"several models are up ({names}): name one, or use --all", 2)
    return running


def _name_of(target: str) -> str:
    return load_one_model(Path(target)).name if Path(target).is_file() else target


def _end(record: InstanceRecord, timeout_seconds: float) -> None:
    os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_seconds
    while record.is_running():
        if time.monotonic() > deadline:
            raise UserError(
                f"{record.name} (pid {record.pid}) still drains after {timeout_seconds:g} s; "
                f"run `stageline down {record.name}` again to end it at once"
            )
        time.sleep(_LOOK_SECONDS)
