"""What is found in the text of an answer that may call tools, and what of that text may be a call. Pure."""

import json
import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

OPENING_TAG: Final = "<tool_call>"
CLOSING_TAG: Final = "</tool_call>"
_ID_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
"""Some models' templates refuse an id of another length when the call comes back in the next turn."""
_FIRST_KEY: Final = re.compile(r'\s*(?:\{\s*(?:"(\w*)(?:"(.*))?)?)?', re.DOTALL)
"""All of an object that ends anywhere: its first key, and what follows that once it is complete."""
_TEXT_VALUE: Final = re.compile(r'\s*(?::\s*(?:"([\w-]*)(".*)?)?)?', re.DOTALL)
"""All that follows a key: the text that is its value, and what follows that once it is complete."""
_ARGUMENT_KEYS: Final = ("arguments", "parameters")


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is a JSON object, written out, or what is known of it."""

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id)


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments of the call begun before."""

    text: str


Piece = str | Call | ArgumentsPiece


def calls_of(pieces: Sequence[Piece]) -> list[Call]:
    """The calls in `pieces`, each with all of its arguments."""
    calls: list[Call] = []
    for piece in pieces:
        match piece:
            case Call():
                calls.append(piece)
            case ArgumentsPiece(text=text):
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + text)
            case str():
                pass
    return calls


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


def may_become_call(text: str, names: Collection[str], in_tags: bool) -> bool:
    """Whether `text`, broken off at its end, is the beginning of a call of an offered tool.

    What the object's first key is decides. Between tags it may be any, since nothing but calls is written there.
    """
    if (begun := _FIRST_KEY.fullmatch(text)) is None:
        return False
    key, after = begun.groups()
    values: dict[str, Collection[str]] = {"name": names, "type": ("function",)}
    if after is None:
        return in_tags or any(one.startswith(key or "") for one in (*values, *_ARGUMENT_KEYS))
    if key not in values:
        return in_tags or key in _ARGUMENT_KEYS
    if (valued := _TEXT_VALUE.fullmatch(after)) is None:
        return False
    value, after_value = valued.groups()
    if after_value is None:
        return any(one.startswith(value or "") for one in values[key])
    return value in values[key]


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(mark[:count])), 0)
