"""`hf://` sources: a Hugging Face repository, fetched by `huggingface_hub` at one commit.

The config is fetched and judged before the weights. Only what serving needs is fetched; each file's size, and its
SHA-256 where the Hub gives one, are checked. The token goes to the Hub client and nowhere else: not into messages, not
to disk.
"""

import os
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.tqdm import disable_progress_bars

from stageline_api import env
from stageline_api.model_source import HubSource
from stageline_runtime.prepare.errors import BadConfigError, PrepareError
from stageline_runtime.prepare.growing_files import report_growth
from stageline_runtime.prepare.hub_errors import as_prepare_error
from stageline_runtime.prepare.model_files import read_supported_config
from stageline_runtime.prepare.pip_client import sha256_of
from stageline_runtime.prepare.progress import Reporter

HUB_ENDPOINT = "HF_ENDPOINT"
NEEDED_SUFFIXES = (".safetensors", ".json", ".jinja")
NEEDED_NAMES = ("tokenizer.model", "merges.txt", "vocab.txt")
UNNEEDED_PREFIX = "consolidated"
"""Some repositories hold the same weights a second time under their author's own layout."""


def fill_from_hub(source: HubSource, model: Path, scratch: Path, reporter: Reporter) -> str:
    """Download the repository's model files into `model`; returns the commit that the revision stood for.

    Raises:
        PrepareError: the Hub can't be reached or refuses access, or a file isn't what it promises.
        BadConfigError: there is no such repository or revision, or it holds no model that is supported.
        OSError: the disk refused.
    """
    token = os.environ.get(env.HF_TOKEN, "").strip() or None
    # False, not None: with None the client would look for a token of its own in this user's home.
    api = HfApi(endpoint=os.environ.get(HUB_ENDPOINT) or None, token=token or False)
    disable_progress_bars()
    reporter.note(f"Looking up {source.canonical}")
    with as_prepare_error(source, has_token=token is not None):
        info = api.model_info(source.repo, revision=source.revision, files_metadata=True)
    siblings = sorted(
        (sibling for sibling in info.siblings or [] if is_needed(sibling.rfilename)),
        key=lambda sibling: (sibling.rfilename != "config.json", sibling.rfilename),
    )
    _require_model(source, [sibling.rfilename for sibling in siblings])
    total_bytes = sum(sibling.size or 0 for sibling in siblings)
    with (
        reporter.task(f"Downloading {source.repo}", total_bytes) as advance_to,
        report_growth(scratch, advance_to),
        as_prepare_error(source, has_token=token is not None),
    ):
        for sibling in siblings:
            _download(api, source, str(info.sha), sibling, scratch)
    for sibling in siblings:
        (scratch / sibling.rfilename).rename(model / sibling.rfilename)
    return str(info.sha)


def is_needed(name: str) -> bool:
    """Whether serving needs this file of a repository: weights, configs, tokenizer and template at its top level."""
    if "/" in name or name.startswith(UNNEEDED_PREFIX):
        return False
    return name.endswith(NEEDED_SUFFIXES) or name in NEEDED_NAMES


def _require_model(source: HubSource, names: list[str]) -> None:
    """Refuse a repository that isn't a model in Hugging Face form, before anything is downloaded."""
    for name in ("config.json", "tokenizer.json"):
        if name not in names:
            raise BadConfigError(f"{source.canonical} has no {name}; it is not a model this runtime can serve")
    if not any(name.endswith(".safetensors") for name in names):
        raise BadConfigError(f"{source.canonical} has no .safetensors file; other weight formats are not supported")


def _download(api: HfApi, source: HubSource, commit: str, sibling: RepoSibling, directory: Path) -> None:
    name = sibling.rfilename
    path = Path(api.hf_hub_download(source.repo, name, revision=commit, local_dir=directory))
    size = path.stat().st_size
    if sibling.size is not None and size != sibling.size:
        raise PrepareError(f"{name} of {source.repo} has {size} bytes, but the Hub promises {sibling.size}")
    if sibling.lfs is not None and sha256_of(path) != sibling.lfs.sha256:
        raise PrepareError(f"{name} of {source.repo} does not match the SHA-256 that the Hub promises")
    if name == "config.json":
        read_supported_config(directory, source.canonical)
