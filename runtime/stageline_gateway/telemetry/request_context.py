"""What a request is called outside: the client's `X-Request-Id` and its W3C trace context.

A name that could not go into a log line or a header as it is (too long, not printable ASCII) is left out, and the
gateway's own id stands for it; a `traceparent` that breaks the recommendation's form is left out, as it demands
(https://www.w3.org/TR/trace-context/, section 3.2), and with it its `tracestate`, which else is passed on as it came.
Nothing of it is ever a reason to refuse.
"""

import re
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers

MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_STATE_CHARACTERS: Final = 512
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_STATE_MEMBER: Final = re.compile(
    r"[a-z0-9][a-z0-9_\-*/]{0,255}(@[a-z0-9][a-z0-9_\-*/]{0,13})?=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a request belongs in a trace; None where nothing is known."""

    parent: str | None = None
    """`traceparent`."""
    state: str | None = None
    """`tracestate`."""

    def headers(self) -> dict[str, str]:
        """As it goes to the next process."""
        named = {"traceparent": self.parent, "tracestate": self.state}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Names given by the client; None where it gave none that is usable."""

    request_id: str | None = None
    trace: TraceContext = TraceContext()

    @classmethod
    def of(cls, headers: Headers) -> "RequestContext":
        """Read all from a request's headers."""
        parent = _traceparent(headers.get("traceparent"))
        # A tracestate may come in several headers, which are one list.
        state = None if parent is None else _tracestate(",".join(headers.getlist("tracestate")))
        return cls(_request_id(headers.get("x-request-id")), TraceContext(parent, state))


def _request_id(value: str | None) -> str | None:
    if not value or len(value) > MAX_REQUEST_ID_CHARACTERS:
        return None
    return value if value.isascii() and value.isprintable() else None


def _traceparent(value: str | None) -> str | None:
    """Version ff is invalid, and so are ids of zeros alone."""
    found = _TRACEPARENT.fullmatch(value or "")
    if (
        found is None
        or value is None
        or value.startswith("ff")
        or not all(set(part) - {"0"} for part in found.groups())
    ):
        return None
    return value


def _tracestate(value: str) -> str | None:
    """Empty members are allowed; one that breaks the form makes all of it invalid."""
    members = [member.strip(" \t") for member in value.split(",")]
    given = [member for member in members if member]
    if not given or not all(map(_STATE_MEMBER.fullmatch, given)):
        return None
    state = ",".join(given)
    return state if len(state) <= MAX_STATE_CHARACTERS else None
