"""HTTP answers for what is refused: an `EngineError` body that names the field, the value and the rule."""

import math
import reprlib

from fastapi import Response
from pydantic import ValidationError

from stageline_api.engine_http import ErrorCode, Failed
from stageline_runtime.engine.errors import EngineRefusal

MAX_SHOWN_CHARACTERS = 80
_BOUNDED = reprlib.Repr()
_BOUNDED.maxlist = _BOUNDED.maxtuple = _BOUNDED.maxdict = MAX_SHOWN_CHARACTERS
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 2 * MAX_SHOWN_CHARACTERS
_KIND_TO_PARAM = {"chat": "messages", "text": "prompt", "tokens": "prompt"}


def refusal_response(refusal: EngineRefusal, status: int | None = None) -> Response:
    """The answer for `refusal`, with `Retry-After` where trying again helps."""
    headers = {}
    if refusal.retry_after_seconds is not None:
        headers["Retry-After"] = str(math.ceil(refusal.retry_after_seconds))
    return Response(
        refusal.body().model_dump_json(),
        status_code=refusal.http_status if status is None else status,
        headers=headers,
        media_type="application/json",
    )


def invalid_body(error: ValidationError) -> EngineRefusal:
    """The refusal of a body that isn't a `GenerateRequest`, from the first of its faults."""
    fault = error.errors(include_url=False, include_context=False)[0]
    location = fault["loc"]
    if not location:
        return EngineRefusal(ErrorCode.INVALID_VALUE, f"The request body can't be read: {fault['msg']}.")
    kind = location[1] if location[0] == "prompt" and len(location) > 1 else None
    path = ".".join(str(part) for index, part in enumerate(location) if not (kind in _KIND_TO_PARAM and index == 1))
    shown = "" if fault["type"] == "missing" else f", not {_shorten(fault['input'])}"
    return EngineRefusal(ErrorCode.INVALID_VALUE, f"{path}: {fault['msg']}{shown}.", param=_param(location))


def body_too_large(max_body_bytes: int) -> EngineRefusal:
    return EngineRefusal(ErrorCode.INVALID_VALUE, f"The request body is larger than {max_body_bytes} bytes.")


def internal_error_response() -> Response:
    """The answer after a bug: it says so, and where to look, and nothing of the program's inside."""
    failed = Failed(message="The engine failed on this request; its log says why.")
    return Response(failed.model_dump_json(), status_code=500, media_type="application/json")


def _param(location: tuple[int | str, ...]) -> str:
    """The field in OpenAI's vocabulary: a prompt's kind decides its name, sampling fields go by their own."""
    match location:
        case ("prompt", str(kind), *_):
            return _KIND_TO_PARAM.get(kind, "prompt")
        case ("sampling", name, *_):
            return str(name)
        case _:
            return str(location[0])


def _shorten(value: object) -> str:
    # However large the value is, its beginning alone is written out.
    shown = repr(value[: MAX_SHOWN_CHARACTERS + 1]) if isinstance(value, str) else _BOUNDED.repr(value)
    return shown if len(shown) <= MAX_SHOWN_CHARACTERS else shown[:MAX_SHOWN_CHARACTERS] + "…"
