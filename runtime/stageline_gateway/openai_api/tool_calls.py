"""Calls of tools in the text of a whole answer. Pure.

A call is given out when it is complete, never in part. Text that turns out to be no call of an offered tool is given
out as the text it is: nothing that the model wrote is lost. What a stream gets of a call before it is complete is
`streamed_calls`' matter.
"""

import json
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from stageline_api.engine_http import ToolCallFormat

OPENING_TAG: Final = "<tool_call>"
CLOSING_TAG: Final = "</tool_call>"
_ID_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
"""Some models' templates refuse an id of another length when the call comes back in the next turn."""


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is a JSON object, written out."""

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id)


Piece = str | Call


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments of the call begun before."""

    text: str


class CallReader(Protocol):
    """Splits an answer into text and calls."""

    def push(self, text: str) -> list[Piece]:
        """What `text` completes."""

    def finish(self) -> list[Piece]:
        """What was held back, at the answer's end."""


def reader_for(form: ToolCallFormat | None, names: Collection[str]) -> CallReader:
    """A reader of calls written as `form`; None is the list that a schema of required calls makes."""
    if form is ToolCallFormat.TAGGED:
        return TaggedCalls(names)
    return JsonCalls(names, "{" if form is ToolCallFormat.OBJECT else "[")


def as_call(text: str, names: Collection[str]) -> Call | None:
    """The call that `text` is, if it is one of an offered tool with an object of arguments."""
    try:
        value: Any = json.loads(text)
        if not isinstance(value, dict) or value.get("name") not in names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)


class TaggedCalls:
    """`<tool_call>…</tool_call>` within text. Blanks between and after calls are dropped."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._rest = ""
        self._inside = False
        self._called = False

    def push(self, text: str) -> list[Piece]:
        # Inside a call only a new end can complete it: looking at the whole of a long call again is not needed.
        seam = max(0, len(self._rest) - len(CLOSING_TAG)) if self._inside else 0
        self._rest += text
        pieces: list[Piece] = []
        while (at := self._rest.find(CLOSING_TAG if self._inside else OPENING_TAG, seam)) >= 0:
            seam = 0
            before = self._rest[:at]
            self._rest = self._rest[at + len(CLOSING_TAG if self._inside else OPENING_TAG) :]
            pieces += self._call(before) if self._inside else self._text(before)
            self._inside = not self._inside
        if not self._inside:
            kept = held_back(self._rest, OPENING_TAG)
            ready, self._rest = self._rest[: len(self._rest) - kept], self._rest[len(self._rest) - kept :]
            pieces += self._text(ready)
        return pieces

    def finish(self) -> list[Piece]:
        """An unfinished call is text."""
        rest, self._rest = self._rest, ""
        return self._text(OPENING_TAG + rest if self._inside else rest)

    def _text(self, text: str) -> list[Piece]:
        return [] if not text or (self._called and not text.strip()) else [text]

    def _call(self, body: str) -> list[Piece]:
        call = as_call(body, self._names)
        if call is None:
            return [OPENING_TAG + body + CLOSING_TAG]
        self._called = True
        return [call]


class JsonCalls:
    """An answer that is JSON from its first character: one object after another, or a list of objects.

    An answer that begins otherwise is text to its end.
    """

    def __init__(self, names: Collection[str], first: str) -> None:
        self._names = names
        self._first = first
        self._held = ""
        self._scanned = 0
        self._depth = 0
        self._in_string = self._escaped = False
        self._is_text = False
        self._called = False

    def push(self, text: str) -> list[Piece]:
        if self._is_text:
            return [text] if text else []
        self._held += text
        begun = self._held.lstrip()
        if begun and not begun.startswith(self._first) and not self._called:
            self._is_text = True
            return self._release()
        pieces: list[Piece] = []
        while self._scanned < len(self._held):
            self._scanned += 1
            if self._closes_object(self._held[self._scanned - 1]):
                pieces += self._object()
        return pieces

    def finish(self) -> list[Piece]:
        """What is left of a list is its end; all else was no call, and is text."""
        if self._called and not self._held.strip(" \n\r\t,;]"):
            return []
        return self._release()

    def _release(self) -> list[Piece]:
        held, self._held, self._scanned = self._held, "", 0
        return [held] if held else []

    def _closes_object(self, character: str) -> bool:
        """Follow the JSON by one character; whether it ends an outermost object."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            return False
        self._in_string = character == '"'
        self._depth += (character == "{") - (character == "}")
        return character == "}" and self._depth == 0

    def _object(self) -> list[Piece]:
        body, after = self._held[: self._scanned], self._held[self._scanned :]
        call = as_call(body[body.index("{") :], self._names)
        if call is None:
            if self._first == "[":  # the list may go on with calls; what this was is shown at the end
                return []
            self._is_text = True
            return self._release()
        self._held, self._scanned, self._called = after, 0, True
        return [call]
