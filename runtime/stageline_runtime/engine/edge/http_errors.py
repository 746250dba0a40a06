"""HTTP responses for refused requests: an `EngineError` body that names the field, the value and the rule."""

import math
import re
import reprlib
from typing import Final

from fastapi import Response

from stageline_api.engine_http import ErrorCode, Failed, UnreadableError, read_json
from stageline_api.multiplexing import QUICK_LINE_BYTES
from stageline_runtime.engine.errors import EngineRefusal

MAX_SHOWN_CHARACTERS = 80
_BOUNDED = reprlib.Repr()
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = MAX_SHOWN_CHARACTERS
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 2 * MAX_SHOWN_CHARACTERS
_STEP: Final = re.compile(r"\.(\w+)|\[(\d+)\]")
"""Of a path that leads to a value."""
_MISSING: Final = re.compile(r"missing required field `(\w+)`")


def refusal_response(refusal: EngineRefusal, status: int | None = None) -> Response:
    """The answer for `refusal`, with `Retry-After` where trying again helps."""
    headers = {}
    if refusal.retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(refusal.retry_after_seconds))
    return Response(
        refusal.body().to_json(),
        status_code=refusal.http_status if status is None else status,
        headers=headers,
        media_type="application/json",
    )


def invalid_body(error: UnreadableError, body: bytes) -> EngineRefusal:
    """The refusal of a body that isn't what belongs there, by the first of its faults."""
    rule, _, place = str(error).partition(" - at `$")
    path = place.removesuffix("`").removeprefix(".")
    fields: list[str | int] = [name or int(index) for name, index in _STEP.findall("." + path)]
    if (missing := _MISSING.search(rule)) is not None:
        path, fields = f"{path}.{missing[1]}".removeprefix("."), [*fields, missing[1]]
    if not fields:
        return EngineRefusal(ErrorCode.INVALID_VALUE, f"The request body can't be read: {rule}.")
    value = _value_at(body, fields)
    shown = f", not {value}" if value and value not in rule else ""
    return EngineRefusal(ErrorCode.INVALID_VALUE, f"{path}: {rule}{shown}.", param=_param(fields))


def _value_at(body: bytes, fields: list[str | int]) -> str:
    """The wrong value, shortened; empty where it is missing, or the body too long to be read again for it."""
    if len(body) > QUICK_LINE_BYTES:
        return ""
    try:
        value = read_json(body)
        for field in fields:
            value = value[field]
    except (LookupError, TypeError, UnreadableError):
        return ""
    return _shorten(value)


def body_too_large(max_body_bytes: int) -> EngineRefusal:
    return EngineRefusal(ErrorCode.INVALID_VALUE, f"The request body is larger than {max_body_bytes} bytes.")


def internal_error_response() -> Response:
    """The response after a bug: it refers to the log and exposes no internals."""
    failed = Failed(message="The engine failed on this request; its log says why.")
    return Response(failed.to_json(), status_code=500, media_type="application/json")


def _param(fields: list[str | int]) -> str:
    """The field in OpenAI's vocabulary: a chat's messages and sampling fields go by their own names."""
    match fields:
        case ["prompt", "messages", *_]:
            return "messages"
        case ["sampling", name, *_]:
            return str(name)
        case [name, *_]:
            return str(name)
        case _:
            return "prompt"


def _shorten(value: object) -> str:
    # Only the start of the value is formatted, however large it is.
    shown = repr(value[: MAX_SHOWN_CHARACTERS + 1]) if isinstance(value, str) else _BOUNDED.repr(value)
    return shown if len(shown) <= MAX_SHOWN_CHARACTERS else shown[:MAX_SHOWN_CHARACTERS] + "…"
