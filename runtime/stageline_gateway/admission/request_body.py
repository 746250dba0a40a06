"""A request's body: read within bounds of size and time, held in a bounded memory, and parsed as strict JSON.

A body counts against the memory as it comes, so a slow sender holds what it has sent and no more. It counts until its
request is over, because its prompt is kept that long: another engine may have to be asked. Nothing waits here for room:
whatever would go over the limit is refused, and gives back what it held.

Anything a client can send ends in an `ApiError`: a wrong content type, too many bytes, a slow or broken upload,
invalid UTF-8, lone surrogates, NaN, numbers of thousands of digits, nesting deeper than the parser allows.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import Any, Self

from pydantic_core import from_json
from starlette.requests import Request

from stageline_gateway.errors import ApiError, shown


@dataclass(slots=True)
class BodyMemory:
    """What the bodies of all open requests hold. `on_change` is told the bytes."""

    limit_bytes: int = 128 * 1024 * 1024
    body_limit_bytes: int = 4 * 1024 * 1024
    """Of one body."""
    timeout_seconds: float = 30.0
    """From the end of a request's headers to the end of its body."""
    retry_after_seconds: float = 2.0
    on_change: Callable[[int], None] = lambda _: None
    held_bytes: int = 0
    most_held_bytes: int = 0
    """The highest that `held_bytes` ever was."""
    num_reading: int = 0
    """Requests whose bodies are still coming."""

    def check_room(self, size_bytes: int) -> None:
        """Raise ApiError 503 when so many bytes more have no room."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            message = f"The bodies of open requests hold {self.held_bytes} bytes, and there is no room for this one."
            wait_seconds = self.retry_after_seconds
            raise ApiError(503, message, "server_error", code="body_room", retry_after_seconds=wait_seconds)

    def add(self, size_bytes: int) -> None:
        """Count bytes that came (or, negative, that were given back)."""
        self.held_bytes += size_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        self.on_change(self.held_bytes)


@dataclass(slots=True)
class HeldBody:
    """One request's body and its part of the memory. As a context it gives everything back at its end.

    `keep` leaves that to its caller, unless the context ends with an error. `has_come` and `give_back` may be called
    again.
    """

    memory: BodyMemory
    size_bytes: int = 0
    _is_reading: bool = False
    _is_kept: bool = False

    def __enter__(self) -> Self:
        self._is_reading = True
        self.memory.num_reading += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.has_come()
        if error is not None or not self._is_kept:
            self.give_back()

    async def read_object(self, request: Request) -> dict[str, Any]:
        """The body of `request`, a JSON object.

        Raises ApiError (400, 408, 413, 415, 503), and starlette's ClientDisconnect when the client left while sending.
        """
        _require_json(request)
        timeout_seconds = self.memory.timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                raw = await self._read(request)
        except TimeoutError:
            message = f"The request's body did not arrive within {timeout_seconds:g} s."
            raise ApiError(408, message, code="body_timeout") from None
        self.has_come()
        return parse_object(raw)

    async def _read(self, request: Request) -> bytearray:
        limit_bytes = self.memory.body_limit_bytes
        if (declared_bytes := _declared_bytes(request)) > limit_bytes:
            raise _too_large(limit_bytes)
        # Better now than after most of it was sent.
        self.memory.check_room(declared_bytes)
        body = bytearray()
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit_bytes:
                raise _too_large(limit_bytes)
            self.grow(len(chunk))
            body += chunk
        return body

    def grow(self, size_bytes: int) -> None:
        """Count bytes that came; raises ApiError 503 when they have no room."""
        self.memory.check_room(size_bytes)
        self.size_bytes += size_bytes
        self.memory.add(size_bytes)

    def has_come(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.memory.num_reading -= 1

    def keep(self) -> Self:
        """From now on the caller sees to `give_back`."""
        self._is_kept = True
        return self

    def give_back(self) -> None:
        """The request is over."""
        held, self.size_bytes = self.size_bytes, 0
        if held:
            self.memory.add(-held)


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


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse strict JSON whose top level is an object; raises ApiError 400 otherwise."""
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value
