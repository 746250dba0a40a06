"""What the API server may answer instead of yes. Everything is either worth another try or told to a person."""

from collections.abc import Mapping
from typing import Any

_NAMESPACE_ENDING = "NamespaceTerminating"
_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


class ApiError(Exception):
    """The API server refused a request, or did not answer (`status` 0).

    The text names verb, kind and reason, never what was sent.
    """

    def __init__(
        self, what: str, status: int, reason: str = "", message: str = "", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(f"{what}: {status or 'no answer'} {reason} {message}".rstrip())
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_namespace_ending(self) -> bool:
        """The namespace is being deleted: nothing can be made in it any more, and nothing needs to be."""
        return self.reason == _NAMESPACE_ENDING

    @property
    def is_not_found(self) -> bool:
        """The object or the kind does not exist."""
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        """Another writer was first, or the object exists already."""
        return self.status == 409

    @property
    def is_passing(self) -> bool:
        """Overload, an outage or a time-out: the same request may succeed later."""
        return self.status == 0 or self.status in _RETRIED_STATUSES


class StaleError(Exception):
    """What a write was based on is not the newest version: observe again."""


class NotLeadingError(Exception):
    """This replica may not write: another may be leading by now."""


class NameTakenError(Exception):
    """An object of a needed name exists and belongs to someone else."""


def error_of(what: str, status: int, body: Any, headers: Mapping[str, str], hide_message: bool) -> ApiError:
    """Read a metav1.Status answer."""
    answer = body if isinstance(body, Mapping) else {}
    details = answer.get("details") or {}
    seconds = headers.get("Retry-After") or details.get("retryAfterSeconds")
    try:
        retry_after = None if seconds is None else float(seconds)
    except ValueError:
        retry_after = None  # an HTTP date, which API servers don't send
    message = "" if hide_message else " ".join(str(answer.get("message", "")).split())[:1000]
    causes = {cause.get("reason") for cause in details.get("causes") or ()}
    reason = _NAMESPACE_ENDING if _NAMESPACE_ENDING in causes else str(answer.get("reason", ""))
    return ApiError(what, status, reason, message, retry_after)
