"""`stageline debug-bundle`: everything about a model in one archive, without secrets, for debugging."""

import io
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_cli.on_call.bundle.bundle import collect_bundle
from stageline_cli.on_call.sources.choose_source import one_model, open_source, source_options
from stageline_cli.on_call.sources.source import ModelObjects, is_of
from stageline_cli.status import observe_twice

STDOUT: Final = Path("-")
_READINGS_APART_SECONDS: Final = 1.0


@click.command()
@click.argument("model", required=False)
@source_options
@click.option("--group", type=click.IntRange(min=0), help="Only this group's pods, logs and traces.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Archive file; - is standard output. Default: stageline-MODEL-TIME.tar.gz.",
)
@click.option(
    "--trace-seconds",
    type=click.FloatRange(min=0, max=60),
    default=2.0,
    show_default=True,
    help="Seconds to trace; 0 reads the stages' recent plans.",
)
def debug_bundle(model: str | None, group: int | None, output: Path | None, trace_seconds: float, **where: Any) -> None:
    """Pack objects, Events, logs, metrics and traces of MODEL (the only one by default) into one archive.

    Secrets are removed: no Secret is read, and tokens, keys and passwords in variables, headers and logs are redacted.
    The archive's README.md lists missing files with the reason.
    """
    with open_source(**where) as source:
        chosen = _of_group(one_model(source, model), group)
        snapshot = observe_twice(source, [chosen], _READINGS_APART_SECONDS)
        bundle = collect_bundle(source, chosen, snapshot, trace_seconds)
    moment = snapshot.taken_at.astimezone(UTC)
    name = f"stageline-{chosen.name}-{moment:%Y%m%dT%H%M%SZ}"
    path = output or Path(f"{name}.tar.gz")
    if path == STDOUT:
        sys.stdout.buffer.write(archive_bytes(name, bundle.files, moment))
    else:
        write_private(path, archive_bytes(name, bundle.files, moment))
        click.echo(f"{path}: {len(bundle.files)} files; begin with {name}/README.md")
    for piece, reason in sorted(bundle.missing.items()):
        click.echo(f"missing {piece}: {reason}", err=True)


def archive_bytes(folder: str, files: Mapping[str, str], moment: datetime) -> bytes:
    """All files under one folder, as a compressed archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in sorted(files.items()):
            content = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(moment.timestamp()), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read; raises `UserError`."""
    try:
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}") from error


def _of_group(model: ModelObjects, group: int | None) -> ModelObjects:
    if group is None:
        return model
    known = [each["index"] for each in model.manifest.get("status", {}).get("groups", [])]
    if group not in known:
        shown = ", ".join(map(str, known)) or "none"
        raise UserError(f"--group: {model.name} has no group {group}; it has {shown}", USAGE_EXIT_CODE)
    return replace(model, group=group, pods=[pod for pod in model.pods if is_of(pod, group)])
