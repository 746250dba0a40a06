"""Server-sent events as OpenAI writes them: one `data:` line per event, `[DONE]` after a stream that went well."""

import json
from typing import Any, Final

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""`x-accel-buffering` keeps nginx from holding tokens back."""


def encode_json(value: Any) -> bytes:
    """Compact JSON in ASCII alone.

    Escaping everything else keeps U+2028 and U+0085 out of the stream: clients that split it with a general line
    splitter would cut an event there. It also makes any string encodable.
    """
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + encode_json(value) + b"\n\n"
