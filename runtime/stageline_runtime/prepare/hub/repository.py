"""One Hugging Face repository, through `huggingface_hub`: what it holds at a revision, and its files, checked.

Each file's size, and its SHA-256 where the Hub gives one, must be as promised. The token goes to the Hub client and
nowhere else: not into messages, not to disk.
"""

import os
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils.tqdm import disable_progress_bars

from stageline_api import env
from stageline_api.resource.model_source import HubSource
from stageline_runtime.prepare.cache import PromisedFile
from stageline_runtime.prepare.errors import PrepareError
from stageline_runtime.prepare.hub.errors import as_prepare_error
from stageline_runtime.prepare.package.pip_client import sha256_of

HUB_ENDPOINT = "HF_ENDPOINT"


class HubRepository:
    """The repository of a source, under the token in `HF_TOKEN`."""

    def __init__(self, source: HubSource) -> None:
        token = os.environ.get(env.HF_TOKEN, "").strip() or None
        self._source = source
        self._has_token = token is not None
        # False, not None: with None the client would look for a token of its own in this user's home.
        self._api = HfApi(endpoint=os.environ.get(HUB_ENDPOINT) or None, token=token or False)
        disable_progress_bars()

    def look_up(self) -> tuple[str, dict[str, PromisedFile]]:
        """The commit that the revision stands for, and all its files by path.

        Raises:
            PrepareError: the Hub can't be reached or refuses access.
            BadConfigError: there is no such repository or revision.
        """
        with as_prepare_error(self._source, has_token=self._has_token):
            info = self._api.model_info(self._source.repo, revision=self._source.revision, files_metadata=True)
        files = {
            sibling.rfilename: PromisedFile(
                size_bytes=sibling.size, sha256=None if sibling.lfs is None else sibling.lfs.sha256
            )
            for sibling in info.siblings or []
        }
        return str(info.sha), files

    def tensor_shapes(self, commit: str, name: str) -> dict[str, list[int]]:
        """Shape of each tensor of a safetensors file, from its header; the rest of the file is not fetched.

        Raises:
            PrepareError: it can't be fetched, or has no such header.
        """
        with as_prepare_error(self._source, has_token=self._has_token):
            header = self._api.parse_safetensors_file_metadata(self._source.repo, name, revision=commit)
        return {tensor: list(told.shape) for tensor, told in header.tensors.items()}

    def download(self, commit: str, name: str, promised: PromisedFile, directory: Path) -> Path:
        """Fetch one file of a commit to `directory / name`.

        Raises:
            PrepareError: it can't be fetched, or isn't what was promised.
            OSError: the disk refused.
        """
        repo = self._source.repo
        with as_prepare_error(self._source, has_token=self._has_token):
            path = Path(self._api.hf_hub_download(repo, name, revision=commit, local_dir=directory))
        size = path.stat().st_size
        if promised.size_bytes is not None and size != promised.size_bytes:
            raise PrepareError(f"{name} of {repo} has {size} bytes, but the Hub promises {promised.size_bytes}")
        if promised.sha256 is not None and sha256_of(path) != promised.sha256:
            raise PrepareError(f"{name} of {repo} does not match the SHA-256 that the Hub promises")
        return path
