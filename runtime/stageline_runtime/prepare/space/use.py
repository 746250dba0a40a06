"""Who reads an entry of a cache: a shared lock on `.<key>.use`, held for as long as the reader's process lives.

The kernel frees it however that process ends. An entry is removed only by who has this lock to itself, so never while
it is read. The file's time says when the entry was last used. A reader may see the cache read-only: preparation, which
runs before it in every pod, has made the file.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from stageline_api.resource.serving.model_source import FileSource, SourceError, parse_source
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.prepare.cache import prepared_model_dir
from stageline_runtime.prepare.errors import storage_error

_HELD: Final[list[int]] = []
"""Descriptors of what this process reads until its end."""

_log = logging.getLogger(__name__)


def use_file(entry: Path) -> Path:
    """The file whose lock readers of `entry` share."""
    return entry.parent / f".{entry.name}.use"


def asked_entries(config: RuntimeConfig) -> list[Path]:
    """Entries of the cache that a group reads: its model's, and its draft model's; a `file://` source has none."""
    draft = None if config.speculative is None else config.speculative.draft_source
    given = [text for text in (config.source, draft) if text is not None]
    return [
        prepared_model_dir(text, Path(config.cache_dir))
        for text in given
        if not isinstance(parse_source(text), FileSource)
    ]


def hold_models(config: RuntimeConfig) -> None:
    """Share the locks of what a group reads until this process ends. Who can't be locked is read all the same."""
    try:
        entries = asked_entries(config)
    except SourceError:
        return  # whoever reads the model says what is wrong with its source
    for entry in entries:
        try:
            _HELD.append(_share(entry))
        except OSError as error:
            _log.info("%s can't be held: %s; it is read without", use_file(entry), error.strerror)


@contextmanager
def held(entry: Path) -> Iterator[None]:
    """Share the lock of `entry`, whether it is there yet or not, while the block runs. Raises `PrepareError`."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _share(entry)
    except OSError as error:
        raise storage_error(error, f"fill the model cache {entry.parent}") from error
    try:
        yield
    finally:
        os.close(descriptor)


def last_use(entry: Path) -> float:
    """When `entry` was last used as far as anybody told, in seconds of the clock of file times. Raises `OSError`."""
    try:
        return use_file(entry).stat().st_mtime
    except FileNotFoundError:
        return entry.stat().st_mtime


def mark_used(entry: Path) -> None:
    """Say that `entry` is in use now."""
    with suppress(OSError):
        os.utime(use_file(entry))


def _share(entry: Path) -> int:
    path = use_file(entry)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    mark_used(entry)
    return descriptor
