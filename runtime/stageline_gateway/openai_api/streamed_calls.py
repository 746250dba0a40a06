"""Calls of tools in an answer: the name as soon as it is known, then the arguments as the model writes them. Pure.

A call whose object begins with its name and then has an object of arguments is given out piece by piece; one that is
written otherwise waits until it is whole. So a call cut off by the token limit, or broken off by the model, has reached
the client in part, as with OpenAI: the answer's finish reason says so. What never became a call is text, but for the
beginning of a call that the token limit cut off: no client could make anything of that. A whole answer is read by the
same reader as a stream, at its end.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Final

from stageline_api.engine_http import ToolCallFormat
from stageline_gateway.openai_api.chat_types import MAX_NAME_CHARACTERS
from stageline_gateway.openai_api.tool_calls import (
    CLOSING_TAG,
    OPENING_TAG,
    ArgumentsPiece,
    Call,
    Piece,
    as_call,
    held_back,
    may_become_call,
)

_NAMED: Final = rf'\s*\{{\s*"name"\s*:\s*"([\w-]{{1,{MAX_NAME_CHARACTERS}}})"'
_BEGINNING: Final = re.compile(_NAMED + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAME: Final = re.compile(_NAMED)
_TAG_FOR_SURE: Final = "<tool"
"""What may be less of a tag than this is shown when an answer is cut there: it may as well be text."""
_PART_CHARACTERS: Final = 4096
"""A whole answer is read in parts of this size, since each call that is read costs a copy of what follows it."""


@dataclass(slots=True)
class _Braces:
    """Follows JSON by one character after another."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def end_in(self, text: str, start: int = 0) -> int | None:
        """The index after the brace in `text` that closes the outermost object; None while it is open.

        A character that opens a tag ends it too: no JSON has one outside a string.
        """
        for index in range(start, len(text)):
            character = text[index]
            if self.in_string:
                self.in_string = self.escaped or character != '"'
                self.escaped = character == "\\" and not self.escaped
                continue
            self.in_string = character == '"'
            self.depth += (character == "{") - (character == "}")
            if character == "}" and self.depth == 0:
                return index + 1
            if character == "<":
                return index
        return None


class _State(Enum):
    BETWEEN = "between"
    """Outside of calls."""
    HEAD = "head"
    """In a call whose name is not known yet."""
    ARGUMENTS = "arguments"
    TAIL = "tail"
    """After the arguments, in what closes the call."""
    TEXT = "text"
    """No call will come any more."""


class StreamedCalls:
    """Reads an answer written as `form`; None is the list that a schema of required calls makes."""

    def __init__(self, form: ToolCallFormat | None, names: Collection[str]) -> None:
        self._names = names
        self._is_tagged = form is ToolCallFormat.TAGGED
        self._first = "{" if form is ToolCallFormat.OBJECT else "["
        self._state = _State.BETWEEN
        self._rest = ""
        self._seen = 0
        """Characters of the rest that were followed already."""
        self._braces = _Braces()
        self._before = ""
        """What opened the call whose name is not known yet; text if it turns out to be none."""
        self._called = False
        self._blanks: list[str] = []
        """After a call; dropped unless words follow before the next one."""
        self._in_words = False

    def push(self, text: str) -> list[Piece]:
        """What `text` completes."""
        parts = (text[start : start + _PART_CHARACTERS] for start in range(0, len(text), _PART_CHARACTERS))
        return [piece for part in parts for piece in self._pushed(part)]

    def _pushed(self, text: str) -> list[Piece]:
        self._rest += text
        pieces: list[Piece] = []
        before = None
        while before != (self._state, self._rest):
            before = (self._state, self._rest)
            match self._state:
                case _State.BETWEEN:
                    pieces += self._between_tags() if self._is_tagged else self._between_objects()
                case _State.HEAD:
                    pieces += self._head()
                case _State.ARGUMENTS:
                    pieces += self._arguments()
                case _State.TAIL:
                    pieces += self._tail()
                case _State.TEXT:
                    pieces += self._release()
        return pieces

    def finish(self, is_cut: bool) -> list[Piece]:
        """What was held back, at the answer's end; `is_cut`: the model had more to say.

        Of a call that was not given out yet, and that was cut, only the name is told, if it is complete and the call
        is not. One that the model itself left unfinished is text.
        """
        if self._is_in_call(is_cut):
            rest, self._rest = self._rest, ""
            return self._cut_off(rest) if self._state is _State.HEAD else []
        if self._state is _State.HEAD:
            self._rest = self._before + self._rest
        elif self._called and not self._rest.strip(" \n\r\t,;]}"):
            return []
        return self._release()

    def _cut_off(self, head: str) -> list[Piece]:
        call = as_call(head[: len(head) - held_back(head, CLOSING_TAG)], self._names)
        if call is None and (named := _NAME.match(head)) is not None:
            call = Call(named[1], "")
        return [] if call is None else [call]

    def _is_in_call(self, is_cut: bool) -> bool:
        """Whether the rest, which nothing follows, belongs to a call and not to the text."""
        match self._state:
            case _State.HEAD:
                return is_cut and may_become_call(self._rest, self._names, self._is_tagged)
            case _State.TAIL:
                return is_cut or (self._is_tagged and CLOSING_TAG.startswith(self._rest.strip(" \n\r\t}")))
            case _State.BETWEEN if self._is_tagged:
                return is_cut and self._rest.startswith(_TAG_FOR_SURE)
            case _State.BETWEEN:
                return is_cut and "[" in self._rest and not self._rest.strip(" \n\r\t,;[")
            case _:
                return False

    def _release(self) -> list[Piece]:
        text, self._rest, self._seen = self._rest, "", 0
        self._in_words = self._in_words or self._state is _State.TEXT
        return self._words(text)

    def _words(self, text: str) -> list[Piece]:
        """Text outside of calls."""
        if not text:
            return []
        if self._called and not self._in_words and not text.strip():
            self._blanks.append(text)
            return []
        words = "".join([*self._blanks, text])
        self._blanks, self._in_words = [], True
        return [words]

    def _go(self, state: _State, consumed: int) -> None:
        self._state, self._rest, self._seen = state, self._rest[consumed:], 0
        self._braces = _Braces(depth=1 if state is _State.TAIL else 0)

    def _between_tags(self) -> list[Piece]:
        at = self._rest.find(OPENING_TAG)
        if at >= 0:
            text, self._before = self._rest[:at], OPENING_TAG
            self._go(_State.HEAD, at + len(OPENING_TAG))
        else:
            kept = held_back(self._rest, OPENING_TAG)
            text, self._rest = self._rest[: len(self._rest) - kept], self._rest[len(self._rest) - kept :]
        words = self._words(text)
        if at >= 0:
            self._blanks, self._in_words = [], False
        return words

    def _between_objects(self) -> list[Piece]:
        begun = self._rest.lstrip(" \n\r\t,;[" if self._called else None)
        if not begun:
            return []
        if not self._called and begun[0] != self._first:
            self._state = _State.TEXT
            return []
        inner = begun.lstrip(" \n\r\t,;[")
        if inner and inner[0] not in "{]":
            self._state = _State.TEXT
            return []
        at = self._rest.find("{")
        if at >= 0 and not self._rest[:at].strip(" \n\r\t,;["):
            self._before = self._rest[:at]
            self._go(_State.HEAD, at)
        return []

    def _head(self) -> list[Piece]:
        found = _BEGINNING.match(self._rest)
        if found is not None and found[1] in self._names:
            self._go(_State.ARGUMENTS, found.end())
            self._called = True
            return [Call(found[1], "")]
        return self._whole_in_tags() if self._is_tagged else self._whole_object()

    def _whole_in_tags(self) -> list[Piece]:
        at = self._rest.find(CLOSING_TAG, max(0, self._seen - len(CLOSING_TAG)))
        self._seen = len(self._rest)
        if at < 0:
            return []
        body = self._rest[:at]
        self._go(_State.BETWEEN, at + len(CLOSING_TAG))
        return self._call_or(body, self._before + body + CLOSING_TAG)

    def _whole_object(self) -> list[Piece]:
        end = self._braces.end_in(self._rest, self._seen)
        self._seen = len(self._rest)
        if end is None:
            return []
        body = self._rest[:end]
        self._go(_State.BETWEEN, end)
        pieces = self._call_or(body, self._before + body)
        if isinstance(pieces[0], str):
            self._state = _State.TEXT
        return pieces

    def _call_or(self, body: str, text: str) -> list[Piece]:
        call = as_call(body, self._names)
        self._called = self._called or call is not None
        return [text if call is None else call]

    def _arguments(self) -> list[Piece]:
        end = self._braces.end_in(self._rest)
        if end is None:
            piece, self._rest = self._rest, ""
        else:
            piece = self._rest[:end]
            self._go(_State.TAIL, end)
        return [ArgumentsPiece(piece)] if piece else []

    def _tail(self) -> list[Piece]:
        if not self._is_tagged:
            end = self._braces.end_in(self._rest, self._seen)
            self._seen = len(self._rest)
            if end is not None:
                self._go(_State.BETWEEN, end)
            return []
        at = self._rest.find(CLOSING_TAG)
        if at < 0:
            return []
        odd = self._rest[:at]
        self._go(_State.BETWEEN, at + len(CLOSING_TAG))
        return [odd] if odd.strip(" \n\r\t}") else []
