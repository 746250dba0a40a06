"""A body that has come as a whole is counted and refused as one that is still coming."""

import asyncio
from typing import Any, Final

import pytest
from starlette.requests import Request

from stageline_gateway.admission.request_body import BodyMemory, BodyShare, HeldBody
from stageline_gateway.errors import ApiError

JSON: Final = {"content-type": "application/json"}
PLAIN: Final = b'{"model":"m","prompt":"x"}'
MANY: Final = b'{"messages":[' + b"{}," * 20 + b"{}]}"


def asked(body: bytes, headers: dict[str, str]) -> Request:
    """A request whose body is received in one piece."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    named = headers | {"content-length": str(len(body))}
    written = [(name.encode(), value.encode()) for name, value in named.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": written}, receive)


def outcome(body: bytes, headers: dict[str, str], limits: dict[str, int], *, is_here: bool) -> dict[str, object]:
    """What is made of a body, and what is counted then and at its end."""
    memory = BodyMemory(limit_bytes=limits.get("room", 1 << 20), body_limit_bytes=limits.get("body", 1 << 16))
    memory.held_bytes = limits.get("taken", 0)
    share = BodyShare(limits["share"]) if "share" in limits else None
    seen: dict[str, object] = {}
    memory.begin_reading()
    try:
        with HeldBody(memory, share) as held:
            seen["raw"] = asyncio.run(held.read(asked(body, headers), bytearray(body) if is_here else None))
            seen["text"], seen["held"], seen["reading"] = held.text_bytes, memory.held_bytes, memory.num_reading
            seen["fields"] = asyncio.run(held.parsed(bytearray(body)))
            seen["held then"] = memory.held_bytes
    except ApiError as error:
        seen["refused"] = (error.status, error.code, error.message, error.retry_after_seconds)
    return seen | {"left": (memory.held_bytes, memory.num_reading, share and share.held_bytes)}


@pytest.mark.parametrize(
    ("body", "headers", "limits", "code"),
    [
        (PLAIN, JSON, {}, None),
        (MANY, JSON, {}, None),
        (PLAIN, JSON, {"body": len(PLAIN)}, None),
        (PLAIN, JSON, {"body": len(PLAIN) - 1}, "body_too_large"),
        (PLAIN, JSON, {"room": len(PLAIN) - 1}, "body_room"),
        (PLAIN, JSON, {"room": 8000, "taken": 8000 - len(PLAIN) + 1}, "body_room"),
        (PLAIN, JSON, {"share": len(PLAIN) - 1}, "body_share"),
        (MANY, JSON, {"room": len(MANY) + 1000}, "body_room"),
        (MANY, JSON, {"share": len(MANY) + 1000}, "body_share"),
        (b"[" * 40_000, JSON, {"room": 1 << 30}, "body_too_complex"),
        (b"", JSON, {}, "invalid_json"),
        (b"[]", JSON, {}, "invalid_json"),
        (PLAIN, {"content-type": "text/plain"}, {}, "unsupported_media_type"),
        (PLAIN, JSON | {"content-encoding": "gzip"}, {}, "unsupported_media_type"),
    ],
)
def test_it_is_taken_or_refused_alike(
    body: bytes, headers: dict[str, str], limits: dict[str, int], code: str | None
) -> None:
    here, coming = (outcome(body, headers, limits, is_here=is_here) for is_here in (True, False))
    assert here == coming
    refused = here.get("refused")
    assert (refused[1] if isinstance(refused, tuple) else refused) == code
    assert here["left"] == (limits.get("taken", 0), 0, 0 if "share" in limits else None)
