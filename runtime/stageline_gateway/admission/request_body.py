"""Reading a request's body: bounded in bytes, its own and those of all that are open, and in time; and strictly JSON.

Anything a client can send ends in an `ApiError`: a wrong content type, too many bytes, a slow or broken upload,
invalid UTF-8, lone surrogates, NaN, numbers of thousands of digits, nesting deeper than the parser allows.
"""

import asyncio
from email.message import Message
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from stageline_gateway.admission.body_memory import BodyHold
from stageline_gateway.errors import ApiError, shown


def _require_json(request: Request) -> None:
    header = request.headers.get("content-type", "")
    parsed = Message()
    parsed["content-type"] = header
    if not header or parsed.get_content_type() != "application/json":
        raise ApiError(
            415, f"Content-Type must be application/json, not {shown(header)}.", code="unsupported_media_type"
        )
    charset = parsed.get_param("charset", "utf-8")
    if str(charset).lower().replace("_", "-") not in {"utf-8", "utf8"}:
        raise ApiError(415, f"The body's charset must be utf-8, not {shown(charset)}.", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Content-Encoding {shown(encoding)} is not supported.", code="unsupported_media_type")


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"The request's body is larger than {limit_bytes} bytes.", code="body_too_large")


def _declared_bytes(request: Request) -> int:
    """What the client says it will send; 0 when it doesn't say."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdecimal() and len(declared) < 20 else 0


async def _read(request: Request, limit_bytes: int, hold: BodyHold) -> bytearray:
    if (declared_bytes := _declared_bytes(request)) > limit_bytes:
        raise _too_large(limit_bytes)
    # Better now than after most of it was sent.
    hold.intake.check_room(declared_bytes)
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > limit_bytes:
            raise _too_large(limit_bytes)
        hold.grow(len(chunk))
        body += chunk
    return body


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse strict JSON whose top level is an object; raises ApiError 400 otherwise."""
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


async def read_object(request: Request, limit_bytes: int, timeout_seconds: float, hold: BodyHold) -> dict[str, Any]:
    """The request's body as an object; `hold` counts its bytes.

    Raises ApiError (400, 408, 413, 415, 503), and starlette's ClientDisconnect when the client left while sending.
    """
    _require_json(request)
    try:
        async with asyncio.timeout(timeout_seconds):
            raw = await _read(request, limit_bytes, hold)
    except TimeoutError:
        message = f"The request's body did not arrive within {timeout_seconds:g} s."
        raise ApiError(408, message, code="body_timeout") from None
    hold.has_come()
    return parse_object(raw)
