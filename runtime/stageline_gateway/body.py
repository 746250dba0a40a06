"""Reading a request's body: bounded in bytes and in time, and strictly JSON.

Anything a client can send ends in an `ApiError`: a wrong content type, too many bytes, a slow or broken upload,
invalid UTF-8, lone surrogates, NaN, numbers of thousands of digits, nesting deeper than the parser allows.
"""

import asyncio
from email.message import Message
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

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


async def _read(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and len(declared) < 20 and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    chunks: list[bytes] = []
    total_bytes = 0
    async for chunk in request.stream():
        total_bytes += len(chunk)
        if total_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse strict JSON whose top level is an object; raises ApiError 400 otherwise."""
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


async def read_object(request: Request, limit_bytes: int, timeout_seconds: float) -> dict[str, Any]:
    """The request's body as an object.

    Raises ApiError (400, 408, 413, 415), and starlette's ClientDisconnect when the client left while sending.
    """
    _require_json(request)
    try:
        async with asyncio.timeout(timeout_seconds):
            raw = await _read(request, limit_bytes)
    except TimeoutError:
        message = f"The request's body did not arrive within {timeout_seconds:g} s."
        raise ApiError(408, message, code="body_timeout") from None
    return parse_object(raw)
