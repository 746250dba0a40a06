"""Fills a cache entry exactly once: under a lock, in a hidden directory, published by one rename.

`.<key>.lock` is held (flock, so that the kernel frees it when its holder dies) while an entry is made; a second process
waits and then finds the entry. Work happens in `.<key>.partial-*`, on the cache's own file system. Only the lock's
holder has such a directory, so one found with the lock free was left by a killed run and is removed. Lock files stay:
removing one would let two processes lock two files of the same name.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stageline_runtime.prepare.cache import (
    CONVERTER_VERSION,
    MANIFEST_NAME,
    ExpectedFile,
    Manifest,
    cache_key,
    entry_problem,
    files_with_sizes,
    read_manifest,
)
from stageline_runtime.prepare.errors import storage_error
from stageline_runtime.prepare.progress import Reporter

PARTIAL_MARK = ".partial-"


@dataclass(frozen=True, slots=True)
class Filled:
    """What a source gave besides the files written."""

    resolved: str
    """What the source stood for: a commit, a file's SHA-256."""
    shards: dict[str, ExpectedFile] = field(default_factory=dict)
    """Weight files left for later, by name."""


Fill = Callable[[Path, Path], Filled]
"""Writes a model: takes an empty model directory and a scratch directory."""


def ensure_entry(cache_dir: Path, canonical_source: str, fill: Fill, reporter: Reporter) -> Path:
    """The complete entry of a source; `fill` runs when there is none yet.

    Raises:
        PrepareError: the cache can't be written, or `fill` refused.
    """
    key = cache_key(canonical_source)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir, key, "this model", reporter):
            remove_leftovers(cache_dir, key)
            if _is_complete(cache_dir / key, reporter):
                reporter.note(f"Found {canonical_source} in the cache")
            else:
                _fill_and_publish(cache_dir, canonical_source, fill)
    except OSError as error:
        raise storage_error(error, f"fill the model cache {cache_dir}") from error
    return cache_dir / key


def _is_complete(entry: Path, reporter: Reporter) -> bool:
    if not entry.exists():
        return False
    problem = entry_problem(entry)
    if problem is not None:
        reporter.note(f"The cache entry {entry} is damaged ({problem}); making it again")
    return problem is None


def _fill_and_publish(cache_dir: Path, canonical_source: str, fill: Fill) -> None:
    key = cache_key(canonical_source)
    partial = Path(tempfile.mkdtemp(prefix=f".{key}{PARTIAL_MARK}", dir=cache_dir))
    try:
        model, scratch = partial / "model", partial / "scratch"
        model.mkdir()
        scratch.mkdir()
        filled = fill(model, scratch)
        manifest = Manifest(
            source=canonical_source,
            resolved=filled.resolved,
            converter_version=CONVERTER_VERSION,
            files=files_with_sizes(model),
            shards=filled.shards,
        )
        (model / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2), encoding="utf-8")
        _sync(model)
        if (cache_dir / key).exists():
            (cache_dir / key).rename(partial / "damaged")
        model.rename(cache_dir / key)
        sync_one(cache_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def locked(cache_dir: Path, key: str, what: str, reporter: Reporter) -> Iterator[None]:
    """Hold the lock of a key; say that `what` is being prepared elsewhere when that means to wait."""
    path = lock_file(cache_dir, key)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.note(f"Another process is preparing {what}; waiting for it to finish (lock {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_file(cache_dir: Path, key: str) -> Path:
    """The lock file of the entry `key`; its writer holds the lock."""
    return cache_dir / f".{key}.lock"


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Acquire the lock of `path` without waiting; yields whether it was free. The file's time is unchanged."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def remove_entry(entry: Path) -> str:
    """Remove an entry while the caller holds its lock; returns the entry's source, or its key if the source isn't
    recorded.

    The entry is renamed to a leftover first. A process that dies in between leaves a directory that the next run
    removes, and never a part of an entry under the entry's name.
    """
    manifest = read_manifest(entry)
    leftover = Path(tempfile.mkdtemp(prefix=f".{entry.name}{PARTIAL_MARK}", dir=entry.parent))
    entry.rename(leftover / "removed")
    shutil.rmtree(leftover)
    return entry.name if manifest is None else manifest.source


def remove_leftovers(cache_dir: Path, own_key: str) -> None:
    """Remove leftovers of killed runs: of this entry (the caller holds its lock), and of others with a free lock."""
    for partial in cache_dir.glob(f".*{PARTIAL_MARK}*"):
        key = partial.name[1:].partition(PARTIAL_MARK)[0]
        if key == own_key:
            shutil.rmtree(partial, ignore_errors=True)
            continue
        with claimed(lock_file(cache_dir, key)) as has_no_writer:
            if has_no_writer:
                shutil.rmtree(partial, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Force the files to disk, so that a rename that survives a power cut names whole files."""
    for path in directory.rglob("*"):
        sync_one(path)
    sync_one(directory)


def sync_one(path: Path) -> None:
    """Force one file's content, or one directory's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
