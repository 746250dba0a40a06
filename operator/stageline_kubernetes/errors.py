"""Errors of API server requests: each is either retried or reported to a user."""

from collections.abc import Mapping
from typing import Any

_NAMESPACE_ENDING = "NamespaceTerminating"
_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


class ApiError(Exception):
    """The API server refused a request, or did not respond (`status` 0).

    The message is for users: it may quote the API server, never the request.
    """

    def __init__(self, text: str, status: int, reason: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_namespace_ending(self) -> bool:
        """The namespace is being deleted: nothing can be created in it."""
        return self.reason == _NAMESPACE_ENDING

    @property
    def is_not_found(self) -> bool:
        """The object or the kind does not exist."""
        return self.status == 404

    @property
    def is_expired(self) -> bool:
        """The resourceVersion of the watch is too old: list again."""
        return self.status == 410

    @property
    def is_conflict(self) -> bool:
        """Another writer was first, or the object exists already."""
        return self.status == 409

    @property
    def is_passing(self) -> bool:
        """Overload, an outage or a time-out: the same request may succeed later."""
        return self.status == 0 or self.status in _RETRIED_STATUSES


def error_of(what: str, status: int, body: Any, headers: Mapping[str, str], hide_message: bool) -> ApiError:
    """The error of a request, described by `what`, from a `metav1.Status` response."""
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
    return ApiError(f"{what}: {status} {reason} {message}".rstrip(), status, reason, retry_after)
