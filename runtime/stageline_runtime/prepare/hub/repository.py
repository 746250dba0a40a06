"""One Hugging Face repository, through `huggingface_hub`: its files at a revision, and checked downloads.

Each file's size and hash must match the announced ones: SHA-256 for files in LFS, Git's own hash for the others. The
token is passed only to the Hub client: never to messages or the disk. The client's exceptions become a sentence: which
repository, which problem, which remedy.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from stageline_api import env
from stageline_api.resource.serving.model_source import HubSource
from stageline_runtime.prepare.cache import ExpectedFile
from stageline_runtime.prepare.errors import WITHOUT_THE_NETWORK, BadConfigError, PrepareError
from stageline_runtime.prepare.package.pip_client import sha256_of

CLIENT_LIBRARIES = frozenset({"huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})
"""Libraries with exceptions that count as "the network failed". The client has changed its HTTP library repeatedly."""


@contextmanager
def as_prepare_error(source: HubSource, *, has_token: bool) -> Iterator[None]:
    """Run Hub calls.

    Raises:
        PrepareError: in place of any error of the client or its HTTP library. Others, a full disk's too, pass through.
        BadConfigError: there is no such repository or revision.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in CLIENT_LIBRARIES:
            raise
        # "from None": the client's own text may repeat request headers.
        kind = BadConfigError if _is_lasting(error) else PrepareError
        raise kind(_sentence(source, error, has_token)) from None


def _is_lasting(error: Exception) -> bool:
    """Whether only another source helps. Not for a gated repository: the user may still accept its terms."""
    absent = isinstance(error, RepositoryNotFoundError | RevisionNotFoundError)
    return absent and not isinstance(error, GatedRepoError)


def _sentence(source: HubSource, error: Exception, has_token: bool) -> str:
    token = "the token in HF_TOKEN" if has_token else "no token (HF_TOKEN, from model.tokenSecretRef, is not set)"
    match error:
        case GatedRepoError():
            return (
                f"{source.repo} is gated: accept its terms on the Hub and give a token that may read it; used {token}"
            )
        case RepositoryNotFoundError():
            return f"{source.repo} does not exist on the Hub or is private; used {token}"
        case RevisionNotFoundError():
            return f"{source.repo} has no branch, tag or commit {source.revision!r}"
        case RemoteEntryNotFoundError():
            return f"{source.repo} lost a file while it was being downloaded; try again"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"the Hub refuses access to {source.repo} (status {error.response.status_code}); used {token}"
        case HfHubHTTPError():
            return f"the Hub answers status {error.response.status_code} for {source.repo}; try again later"
        case _:
            return (
                f"cannot download {source.repo}: the Hub can't be reached or the connection broke "
                f"({type(error).__name__}); check the network and HF_ENDPOINT, then try again; {WITHOUT_THE_NETWORK}"
            )


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

    def look_up(self) -> tuple[str, dict[str, ExpectedFile]]:
        """The commit that the revision stands for, and all its files by path.

        Raises:
            PrepareError: the Hub can't be reached or refuses access.
            BadConfigError: there is no such repository or revision.
        """
        with as_prepare_error(self._source, has_token=self._has_token):
            info = self._api.model_info(self._source.repo, revision=self._source.revision, files_metadata=True)
        files = {
            sibling.rfilename: ExpectedFile(
                size_bytes=sibling.size,
                sha256=None if sibling.lfs is None else sibling.lfs.sha256,
                # Of a file in LFS this is the hash of a pointer to it.
                git_sha1=sibling.blob_id if sibling.lfs is None else None,
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

    def download(self, commit: str, name: str, expected: ExpectedFile, directory: Path) -> Path:
        """Fetch one file of a commit to `directory / name`.

        Raises:
            PrepareError: it can't be fetched, or differs from the expected file.
            OSError: writing to the disk failed.
        """
        repo = self._source.repo
        with as_prepare_error(self._source, has_token=self._has_token):
            path = Path(self._api.hf_hub_download(repo, name, revision=commit, local_dir=directory))
        size = path.stat().st_size
        if expected.size_bytes is not None and size != expected.size_bytes:
            raise PrepareError(f"{name} of {repo} has {size} bytes, but the Hub promises {expected.size_bytes}")
        if expected.sha256 is not None and sha256_of(path) != expected.sha256:
            raise PrepareError(f"{name} of {repo} does not match the SHA-256 that the Hub promises")
        if expected.git_sha1 is not None and _git_sha1(path) != expected.git_sha1:
            raise PrepareError(f"{name} of {repo} does not match the hash that the Hub promises")
        return path


def _git_sha1(path: Path) -> str:
    """What Git calls this content. SHA-1 is all that a Git repository has; a wrong file must still be made for it."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
