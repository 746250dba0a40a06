"""A request's body: read within bounds of size and time, held in a bounded memory, and parsed as strict JSON.

A body counts against the memory as it comes, so a slow sender holds what it has sent and no more; what parsing it will
make counts before that is made (`body_sizes`). Arguments of calls are JSON inside of strings: they count as what they
become, once the body around them is parsed. When the engine's request is made, what that keeps counts in place of what
it was made from. It counts until its request is over, because its prompt is kept that long: another engine may have to
be asked. Nothing waits here for room: whatever would go over the limit is refused, and gives back what it held. Of
large bodies one is worked on at a time, and only then counts what that needs.

Anything a client can send ends in an `ApiError`: a wrong content type, too many bytes, a slow or broken upload,
invalid UTF-8, lone surrogates, NaN, numbers of thousands of digits, nesting deeper than the parser allows.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.message import Message
from math import isinf
from typing import Any, Final, Self, TypeVar

import msgspec
from starlette.requests import Request

from stageline_gateway.admission.body_sizes import (
    BodyShape,
    check_shape,
    held_text_bytes,
    most_text_bytes,
    shape_of,
    shape_with_written,
)
from stageline_gateway.errors import ApiError, bad_value, shown
from stageline_gateway.large_work import QUICK_BYTES, off_the_loop
from stageline_gateway.openai_api.checked_types import field_path
from stageline_gateway.strict_json import parse_json

Made = TypeVar("Made")

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
"""Some clients begin UTF-8 with it; RFC 8259 lets a reader ignore it."""
_NO_SHAPE: Final = BodyShape(0, 0)


@dataclass(slots=True)
class BodyShare:
    """What one caller may hold of the memory, and does, so that no caller fills it."""

    limit_bytes: int
    held_bytes: int = 0


@dataclass(slots=True)
class BodyMemory:
    """What the bodies of all open requests hold."""

    limit_bytes: int = 128 * 1024 * 1024
    body_limit_bytes: int = 4 * 1024 * 1024
    """The largest that the body of one request may be."""
    timeout_seconds: float = 30.0
    """From the end of a request's headers to the end of its body."""
    retry_after_seconds: float = 2.0
    held_bytes: int = 0
    most_held_bytes: int = 0
    """The highest that `held_bytes` ever was."""
    num_reading: int = 0
    """Requests whose bodies are still being received."""

    def begin_reading(self) -> None:
        """A body is coming; `end_reading` ends that."""
        self.num_reading += 1

    def end_reading(self) -> None:
        self.num_reading -= 1

    def check_room(self, size_bytes: int, share: BodyShare | None = None) -> None:
        """Raise ApiError 503 when so many bytes more have no room, 429 when they have none in `share`."""
        wait_seconds = self.retry_after_seconds
        if self.held_bytes + size_bytes > self.limit_bytes:
            message = f"The bodies of open requests hold {self.held_bytes} bytes, and there is no room for this one."
            raise ApiError(503, message, "server_error", code="body_room", retry_after_seconds=wait_seconds)
        if share is not None and share.held_bytes + size_bytes > share.limit_bytes:
            message = f"Bodies of this API key hold {share.held_bytes} bytes; its share is {share.limit_bytes}."
            raise ApiError(429, message, "rate_limit_error", code="body_share", retry_after_seconds=wait_seconds)

    def take(self, size_bytes: int, share: BodyShare | None = None) -> None:
        """Count bytes that came. Raises as `check_room` when they have no room, and counts none then."""
        self.check_room(size_bytes, share)
        self._add(size_bytes, share)
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

    def give_back(self, size_bytes: int, share: BodyShare | None = None) -> None:
        self._add(-size_bytes, share)

    def _add(self, size_bytes: int, share: BodyShare | None) -> None:
        self.held_bytes += size_bytes
        if share is not None:
            share.held_bytes += size_bytes


@dataclass(slots=True)
class HeldBody:
    """One request's body and its part of the memory. As a context it gives everything back at its end.

    Its maker has called the memory's `begin_reading`.

    `keep` leaves that to its caller, unless the context ends with an error. `has_come` and `give_back` may be called
    again.
    """

    memory: BodyMemory
    share: BodyShare | None = None
    """Of its caller; None where callers are not told apart."""
    on_arrival: Callable[[], None] = lambda: None
    """Called once, when the context ends."""
    size_bytes: int = 0
    text_bytes: int = 0
    """Of the body as it came; the rest is what it was parsed to, and copies."""
    _shape: BodyShape = _NO_SHAPE
    """Of the body as it came; then, with the JSON that its strings hold, of all that was parsed."""
    _most_bytes: int = 0
    """That its texts may take once they are parsed."""
    _texts_bytes: int = 0
    """Counted for texts: of the body as it came, then of what it was parsed to, then of what was made of that."""
    _line_bytes: int = 0
    """Counted for lines to engines that may be unsent."""
    _is_reading: bool = True
    _is_kept: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.has_come()
        self.on_arrival()
        if error is not None or not self._is_kept:
            self.give_back()

    @property
    def is_quick(self) -> bool:
        """Whether what was read is parsed and checked so soon that it needs no thread."""
        return self._work_bytes <= QUICK_BYTES

    @property
    def _work_bytes(self) -> int:
        """How long parsing and checking takes, in bytes of plain text."""
        return self.text_bytes + self._shape.work_bytes

    async def made_of(
        self, request: Request, work: Callable[[dict[str, Any]], Made], keeps: Callable[[Made], object]
    ) -> Made:
        """What `work` makes of the body of `request`, a JSON object. Raises as `read`, `parsed` and `made`."""
        fields = await self.parsed(await self.read(request))
        return await self.made(lambda: work(fields), keeps)

    async def read(self, request: Request, here: bytearray | None = None) -> bytearray:
        """The body of `request`, counted with what it will be parsed to; `here` is all of it, where it has come.

        Raises ApiError (400, 408, 413, 415, 429, 503), and starlette's ClientDisconnect when the client left while
        sending.
        """
        _require_json(request)
        raw = await self._arriving(request) if here is None else self._arrived(here)
        self.has_come()
        if raw.startswith(BYTE_ORDER_MARK):
            del raw[: len(BYTE_ORDER_MARK)]
        self.text_bytes = self._texts_bytes = self.size_bytes
        self._shape, self._most_bytes = await off_the_loop(len(raw), lambda: _first_look(raw), begins=True)
        check_shape(self._shape)
        self.grow(self._shape.extra_bytes)
        if self.is_quick:
            self._count_texts(self._most_bytes)
        return raw

    async def parsed(self, raw: bytearray) -> dict[str, Any]:
        """What was `read`, as a JSON object. Raises ApiError (400, 429, 503).

        Of a large body nothing is left in `raw`: it counts no more.
        """
        if self.is_quick:
            fields, whole = _parsed(raw, self._shape)
        else:
            fields, whole, texts_bytes = await self._parsed_beside(raw)
            self._count_texts(texts_bytes)
        check_shape(whole)
        self.grow(whole.extra_bytes - self._shape.extra_bytes)
        self._shape = whole
        return fields

    async def _parsed_beside(self, raw: bytearray) -> tuple[dict[str, Any], BodyShape, int]:
        """The same, what it has by now, and the bytes of its texts."""

        def parse() -> tuple[dict[str, Any], BodyShape, int]:
            fields, whole = _parsed(raw, self._shape)
            raw.clear()
            return fields, whole, held_text_bytes(fields)

        before = lambda: self._count_texts(self._texts_bytes + self._most_bytes)  # noqa: E731
        return await off_the_loop(self._work_bytes, parse, before)

    def _arrived(self, raw: bytearray) -> bytearray:
        if len(raw) > self.memory.body_limit_bytes:
            raise _too_large(self.memory.body_limit_bytes)
        self.grow(len(raw))
        return raw

    async def _arriving(self, request: Request) -> bytearray:
        timeout_seconds = self.memory.timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._received(request)
        except TimeoutError:
            message = f"The request's body did not arrive within {timeout_seconds:g} s."
            raise ApiError(408, message, code="body_timeout") from None

    async def _received(self, request: Request) -> bytearray:
        limit_bytes = self.memory.body_limit_bytes
        if (declared_bytes := _declared_bytes(request)) > limit_bytes:
            raise _too_large(limit_bytes)
        # Better now than after most of it was sent.
        self.memory.check_room(declared_bytes, self.share)
        body = bytearray()
        async for chunk in request.stream():
            if len(body) + len(chunk) > limit_bytes:
                raise _too_large(limit_bytes)
            self.grow(len(chunk))
            body += chunk
        return body

    async def work(self, work: Callable[[], Made], before: Callable[[], None] = lambda: None) -> Made:
        """`work` on what is held, off the loop where that is much; `before` is called in the loop just before it."""
        # However wide texts are, the time that they take is that of their characters.
        return await off_the_loop(self.size_bytes - self._texts_bytes + self.text_bytes, work, before)

    async def made(self, work: Callable[[], Made], keeps: Callable[[Made], object]) -> Made:
        """What `work` makes of what was `parsed`. From then on the texts of what it `keeps` count, and no others.

        Raises as `grow`, and what `work` does.
        """
        if self.is_quick:
            return await self.work(work)

        def measured() -> tuple[Made, int]:
            made = work()
            return made, held_text_bytes(keeps(made))

        # Texts may be joined, and arguments of calls read.
        made, texts_bytes = await self.work(measured, lambda: self._count_texts(2 * self._texts_bytes))
        self._count_texts(texts_bytes)
        return made

    def grow(self, size_bytes: int) -> None:
        """Count bytes that came; raises ApiError 503 when they have no room."""
        if size_bytes:
            self.memory.take(size_bytes, self.share)
            self.size_bytes += size_bytes

    def _count_texts(self, size_bytes: int) -> None:
        """So much is held for texts now; raises ApiError 503 when that is more than before and has no room."""
        more_bytes = size_bytes - self._texts_bytes
        if more_bytes > 0:
            self.grow(more_bytes)
        else:
            self._shrink(-more_bytes)
        self._texts_bytes = size_bytes

    def _shrink(self, size_bytes: int) -> None:
        if self.size_bytes:  # else all was given back
            self.size_bytes -= size_bytes
            self.memory.give_back(size_bytes, self.share)

    def hold_line(self) -> None:
        """Count a line with the body's text, which an engine may not have taken yet; raises ApiError 503.

        Short ones don't: all together they are no more than what is counted of their bodies, and are gone soon.
        """
        if not self.is_quick:
            self.grow(self.text_bytes)
            self._line_bytes += self.text_bytes

    def line_sent(self) -> None:
        """The engine has read it. What goes to another engine later is sent once that is there, and soon."""
        if self._line_bytes:
            self._shrink(self._line_bytes)
            self._line_bytes = 0

    def copy(self, copies: int) -> None:
        """Count copies of the text before they are made: each choice sends the prompt to an engine by itself.

        Raises:
            ApiError: 503 or 429 while they have no room; 400 when they never will.
        """
        size_bytes = self.text_bytes * copies
        if self.size_bytes + size_bytes > (most := self.share.limit_bytes if self.share else self.memory.limit_bytes):
            rule = f"makes {copies + 1} choices of a body of {self.text_bytes} bytes: more room than there is, {most}"
            raise bad_value("n", rule)
        self.grow(size_bytes)

    def has_come(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.memory.end_reading()

    def keep(self) -> Self:
        """From now on the caller sees to `give_back`."""
        self._is_kept = True
        return self

    def give_back(self) -> None:
        """The request is over."""
        held, self.size_bytes = self.size_bytes, 0
        if held:
            self.memory.give_back(held, self.share)


def _require_json(request: Request) -> None:
    header = request.headers.get("content-type", "")
    if header == "application/json" and "content-encoding" not in request.headers:
        return
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


def _first_look(raw: bytearray) -> tuple[BodyShape, int]:
    """The shape of a body, and what its texts may take."""
    return shape_of(raw), most_text_bytes(raw)


def _parsed(raw: bytearray, shape: BodyShape) -> tuple[dict[str, Any], BodyShape]:
    fields = parse_object(raw)
    return fields, shape_with_written(shape, fields)


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Parse strict JSON whose top level is an object; raises ApiError 400 otherwise."""
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise _unreadable(raw, error) from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return value


def _unreadable(raw: bytes | bytearray, error: ValueError) -> ApiError:
    if (steps := _number_out_of_range(raw)) is not None:
        rule = "is a number larger than a double can be (about 1.8e308)"
        return bad_value(field_path(steps), rule, "invalid_json")
    return ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json")


def _number_out_of_range(raw: bytes | bytearray) -> list[str | int] | None:
    """Where one is; None where there is none, or the body is no JSON otherwise."""
    try:
        return _steps_to_infinity(msgspec.json.Decoder(float_hook=float).decode(raw))
    except (ValueError, RecursionError):
        return None


def _steps_to_infinity(value: Any) -> list[str | int] | None:
    if isinstance(value, float) and isinf(value):
        return []
    if not isinstance(value, dict | list):
        return None
    entries: Iterable[tuple[str | int, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    for step, one in entries:
        if (steps := _steps_to_infinity(one)) is not None:
            return [step, *steps]
    return None
