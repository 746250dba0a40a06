"""The forms of a response: JSON that can't fail to be encoded, errors as OpenAI writes them, and server-sent events.

A stream has one `data:` line per event, and ends in `[DONE]` if it went well.
"""

import codecs
import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stageline_gateway.errors import ApiError, gateway_failed
from stageline_gateway.openai_api.dialects.messages_events import REQUEST_ID_HEADER, error_body

SSE_DONE: Final = b"data: [DONE]\n\n"
SSE_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""`x-accel-buffering` keeps nginx from holding tokens back."""
ANTHROPICS: Final = "/v1/messages"
"""Begins the paths of Anthropic's API."""


def encode_json(value: Any) -> bytes:
    """Compact JSON in ASCII alone; `msgspec.Raw` is JSON already, and a number that JSON has not is null.

    Escaping everything else keeps U+2028 and U+0085 out of the stream: clients that split it with a general line
    splitter would cut an event there. It also makes any string encodable.
    """
    try:
        written = msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):  # half a character, or an integer of more than 64 bits
        return json.dumps(value, separators=(",", ":"), default=lambda raw: json.loads(bytes(raw))).encode()
    return written if written.isascii() else written.decode().encode("ascii", _ESCAPES)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


_ESCAPES: Final = "stageline.json"
codecs.register_error(_ESCAPES, _escaped)


def sse_event(value: Any) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


logger = logging.getLogger(__name__)


class JsonAnswer(Response):
    """JSON in ASCII, so that any string a client sent can be repeated."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def new_request_id() -> str:
    """Names what was refused before it had an id."""
    return f"req-{uuid.uuid4().hex}"


def error_answer(error: ApiError, headers: Mapping[str, str] | None = None) -> JsonAnswer:
    return _refusal(error, error.body(), headers)


def refuse_message(error: ApiError, headers: Mapping[str, str] | None = None) -> JsonAnswer:
    """As Anthropic writes it."""
    given = dict(headers or {})
    return _refusal(
        error, error_body(error), {REQUEST_ID_HEADER: given.get("x-request-id") or new_request_id()} | given
    )


def with_request_id(answer: Response) -> Response:
    """The same, with the id where Anthropic's clients look for it."""
    answer.headers.setdefault(REQUEST_ID_HEADER, answer.headers.get("x-request-id") or new_request_id())
    return answer


def _refusal(error: ApiError, body: dict[str, Any], headers: Mapping[str, str] | None) -> JsonAnswer:
    return JsonAnswer(body, status_code=error.status, headers={**(headers or {}), **error.headers()})


def add_error_forms(app: FastAPI) -> None:
    """What is no route's own answer has the form that clients of its path expect."""

    def refuse(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        is_anthropics = request.url.path.startswith(ANTHROPICS)
        return refuse_message(error, headers) if is_anthropics else error_answer(error, headers)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return refuse(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:100]
        message = f"{error.detail}: {request.method} {path}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return refuse(request, ApiError(error.status_code, message, code=code), error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        logger.error("a bug in the gateway: %s", type(error).__name__, exc_info=error)
        return refuse(request, gateway_failed())
