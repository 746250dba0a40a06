"""`hf://` sources: a Hugging Face repository at one commit, and only what serving needs of it.

The config is fetched and judged before the weights. Weights that come in shards are left for the stages, each of which
needs only some. The sizes of a model on the coverage path are known from its weights' headers alone, which are fetched.
The client reports no progress that we could pass on, so we look at the files that it fills.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stageline_api.resource.serving.model_source import HubSource
from stageline_runtime.model_facts.model_coverage import TENSORS_FILE
from stageline_runtime.model_facts.weight_files import INDEX_FILE, SINGLE_FILE
from stageline_runtime.prepare.cache import ExpectedFile, bytes_below
from stageline_runtime.prepare.errors import BadConfigError, PrepareError
from stageline_runtime.prepare.hub.repository import HubRepository
from stageline_runtime.prepare.model_files import ConfigReader, weight_files
from stageline_runtime.prepare.progress import AdvanceTo, Reporter
from stageline_runtime.prepare.publish import Filled
from stageline_runtime.prepare.space.make_room import Need

WEIGHTS_SUFFIX = ".safetensors"
NEEDED_SUFFIXES = (WEIGHTS_SUFFIX, ".json", ".jinja")
NEEDED_NAMES = ("tokenizer.model", "merges.txt", "vocab.txt")
TEMPLATE_FOLDER = "additional_chat_templates"
UNNEEDED_PREFIX = "consolidated"
"""Some repositories hold the same weights a second time under their author's own layout."""

Files = Mapping[str, ExpectedFile]


def fill_from_hub(
    source: HubSource, model: Path, scratch: Path, reporter: Reporter, read_config: ConfigReader, need: Need
) -> Filled:
    """Download the repository's model files into `model`, without the weights where these come in shards.

    `read_config` judges the config before anything else is fetched, and `need` makes room for the rest.

    Raises:
        PrepareError: the Hub can't be reached or refuses access, or a file isn't what it promises.
        BadConfigError: there is no such repository or revision, or it holds no model that is supported.
        OSError: the disk refused.
    """
    repository = HubRepository(source)
    reporter.note(f"Looking up {source.canonical}")
    commit, held = repository.look_up()
    files = _believed({name: expected for name, expected in sorted(held.items()) if is_needed(name)})
    _require_model(source, files)
    repository.download(commit, "config.json", files["config.json"], scratch)
    config = read_config(scratch, source.canonical)
    if INDEX_FILE in files:
        repository.download(commit, INDEX_FILE, files[INDEX_FILE], scratch)
    shards = _shards(source, files, scratch)
    if shards and config.is_covered:
        reporter.note(f"Reading the headers of {len(shards)} files of {source.repo}")
        shapes = [repository.tensor_shapes(commit, name) for name in shards]
        (model / TENSORS_FILE).write_text(json.dumps({name: shape for each in shapes for name, shape in each.items()}))
    now = {name: expected for name, expected in files.items() if not shards or not name.endswith(WEIGHTS_SUFFIX)}
    total_bytes = sum(expected.size_bytes or 0 for expected in now.values())
    need(total_bytes)
    with reporter.task(f"Downloading {source.repo}", total_bytes) as advance_to, report_growth(scratch, advance_to):
        for name, expected in now.items():
            if not (scratch / name).exists():
                repository.download(commit, name, expected, scratch)
    for name in now:
        (model / name).parent.mkdir(exist_ok=True)
        (scratch / name).rename(model / name)
    return Filled(commit, shards)


def download_shard(
    source: HubSource, commit: str, name: str, expected: ExpectedFile, directory: Path, reporter: Reporter
) -> Path:
    """Download one weight file of a commit into `directory`.

    Raises:
        PrepareError: it can't be fetched, or differs from the expected file.
        OSError: writing to the disk failed.
    """
    title = f"Downloading {name} of {source.repo}"
    with reporter.task(title, expected.size_bytes) as advance_to, report_growth(directory, advance_to):
        return HubRepository(source).download(commit, name, expected, directory)


def is_needed(name: str) -> bool:
    """Whether serving needs this file of a repository: weights, configs, tokenizer and templates."""
    folder, _, inner = name.rpartition("/")
    if folder == TEMPLATE_FOLDER:
        return inner.endswith(".jinja")
    if folder or name.startswith(UNNEEDED_PREFIX):
        return False
    return name.endswith(NEEDED_SUFFIXES) or name in NEEDED_NAMES


def _believed(files: Files) -> dict[str, ExpectedFile]:
    """`files` without the index and the shards that are unused beside a single file."""
    if SINGLE_FILE not in files:
        return dict(files)
    unread = {name for name in files if name.endswith(WEIGHTS_SUFFIX) and name != SINGLE_FILE} | {INDEX_FILE}
    return {name: expected for name, expected in files.items() if name not in unread}


def _shards(source: HubSource, files: Files, directory: Path) -> dict[str, ExpectedFile]:
    """The weight files that stages can fetch for themselves; none where the model has to be fetched whole."""
    if INDEX_FILE not in files:
        return {}
    names = weight_files(directory, source.canonical)
    for name in names:
        if name not in files:
            raise PrepareError(f"{source.canonical}: {INDEX_FILE} names {name}, which the repository does not hold")
    # Without a size a complete shard can't be told from a missing one.
    return {name: files[name] for name in names} if all(files[name].size_bytes for name in names) else {}


def _require_model(source: HubSource, files: Files) -> None:
    """Refuse a repository that isn't a model in Hugging Face form, before anything is downloaded."""
    for name in ("config.json", "tokenizer.json"):
        if name not in files:
            raise BadConfigError(f"{source.canonical} has no {name}; it is not a model this runtime can serve")
    if not any(name.endswith(WEIGHTS_SUFFIX) for name in files):
        raise BadConfigError(f"{source.canonical} has no .safetensors file; other weight formats are not supported")


LOOK_SECONDS = 0.5


@contextmanager
def report_growth(directory: Path, advance_to: AdvanceTo) -> Iterator[None]:
    """While the body runs, report the bytes below `directory` twice a second, and once more at the end."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            advance_to(bytes_below(directory))

    watcher = threading.Thread(target=look, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    advance_to(bytes_below(directory))
