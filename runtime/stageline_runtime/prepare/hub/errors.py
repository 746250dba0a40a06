"""Turns what the Hub client raises into sentences: which repository, what is wrong, what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from stageline_api.resource.model_source import HubSource
from stageline_runtime.prepare.errors import BadConfigError, PrepareError

CLIENT_LIBRARIES = frozenset({"huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})
"""Whose exceptions count as "the network failed". The client has changed its HTTP library more than once."""


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
    """Whether only another source helps. Not so if it is gated: its terms may be accepted meanwhile."""
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
                f"({type(error).__name__}); check the network and HF_ENDPOINT, then try again"
            )
