"""Marks a cache entry as in use: a shared lock on `.<key>.use`, held as long as the reader's process lives.

The kernel frees the lock however the process ends. Only a process that holds this lock exclusively may remove an entry,
so an entry is never removed while it is read. The file's time is the entry's last use. A reader may see the cache
read-only: preparation, which runs before it in every pod, has made the file.
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
    """The lock file that readers of `entry` share."""
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
    """Share the locks of the entries that a group reads until this process ends. Entries that can't be locked are still
    read."""
    try:
        entries = asked_entries(config)
    except SourceError:
        return  # the code that reads the model reports the problem
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
