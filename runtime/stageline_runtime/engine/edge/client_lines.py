"""What a client writes on a connection that carries many generations: bytes in, checked lines out, bounded.

A request that can't be read is its own stream's matter and refused as `POST /v1/generate` refuses it. Anything else
that can't be read, or is too long, is the connection's: nobody can say which stream was meant.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from stageline_api.engine_http import GenerateRequest
from stageline_api.multiplexing import MOST_LINE_BYTES, ClientLine, Open
from stageline_runtime.engine.edge.http_errors import invalid_body
from stageline_runtime.engine.errors import EngineRefusal

LINE_LIMIT_BYTES: Final = MOST_LINE_BYTES + 1024
"""A request of `MOST_LINE_BYTES`, and what says that it is one, and whose."""
_LINE: Final[TypeAdapter[ClientLine]] = TypeAdapter(ClientLine)


class BrokenConnectionError(Exception):
    """The client doesn't keep to what is agreed: nothing more is read from it. The message shows none of its words."""


class _OpenAnything(Open):
    request: Any


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An `Open` with a request that isn't one."""

    stream: int
    refusal: EngineRefusal


class LineCutter:
    """Cuts what comes into lines; holds no more than the beginning of one."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def cut(self, chunk: bytes) -> Iterable[bytes]:
        """The lines that are whole now, blank ones left out.

        Raises:
            BrokenConnectionError: a line is longer than `LINE_LIMIT_BYTES`.
        """
        self._rest += chunk
        if b"\n" not in chunk:
            _check_length(self._rest)
            return ()
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in (*lines, rest):
            _check_length(line)
        return [line for line in lines if line]

    def end(self) -> None:
        """The client has written all it will.

        Raises:
            BrokenConnectionError: it stopped within a line.
        """
        if self._rest:
            raise BrokenConnectionError("its last line has no end")


def read_line(line: bytes) -> ClientLine | Unreadable:
    """What a line says.

    Raises:
        BrokenConnectionError: it says nothing that is known.
    """
    try:
        return _LINE.validate_json(line)
    except ValidationError as error:
        fault = error
    try:
        opened = _OpenAnything.model_validate_json(line)
        # As it would be read by itself, so that it is refused in the same words.
        GenerateRequest.model_validate_json(to_json(opened.request))
    except ValidationError as error:
        if error.title == GenerateRequest.__name__:
            return Unreadable(opened.stream, invalid_body(error))
    first = fault.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "the whole"
    raise BrokenConnectionError(f"a line of {len(line)} bytes can't be read: {where}: {first['msg']}")


def _check_length(line: bytes | bytearray) -> None:
    if len(line) > LINE_LIMIT_BYTES:
        raise BrokenConnectionError(f"a line is longer than {LINE_LIMIT_BYTES} bytes")
