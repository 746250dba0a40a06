"""Parts of a request that a model of text can't call or read: left out by name, read as text, or refused. Pure.

A tool that can't be called, and an item that only another server understands, are left out and named: the answer stays
what it was. An image in a tool's result is left out with a note in its place. An image in the user's own question is
refused, since an answer to the rest would be another one. A refusal or a document of plain text is text.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from typing import Any, Final

from msgspec import Struct

_KIND: Final = re.compile(r"[a-z][a-z0-9_.:-]{0,39}")
"""A type that may be named in a header."""
_MEDIA: Final = re.compile(r"image|audio|video|document|file|screenshot|container_upload")
_SCHEMA_FIELDS: Final = frozenset({"parameters", "input_schema", "function"})
"""A tool with one of them has a form that a function may have."""
_FUNCTION_WORDS: Final = ("function", "func", "custom", "tool")
"""A type that is nearly one of them, beside such a field, is a mistake and no type of its own."""
_MISTAKE_RATIO: Final = 0.75
"""Of likeness (difflib): `fucntion` has 0.88 and `custmo` 0.83, `builtin_function` 0.67 and `custom_tool` 0.71."""
_TEXT_DATA: Final = re.compile(r"data:text/[a-z0-9.+-]+(?:;charset=utf-?8)?;base64,", re.IGNORECASE)


class Unread(Struct, frozen=True):
    """What is left out; it keeps its place, so that the others keep their indexes in messages."""

    type: str


def kind_of(value: Any) -> str | None:
    """The type of a part, an item or a tool; None where it has none that may be named."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) and _KIND.fullmatch(kind) else None


def is_server_tool(tool: Any, own: AbstractSet[str]) -> bool:
    """Whether `tool` is declared for a server that runs it, or has a form of its own; `own` are types of functions."""
    kind = kind_of(tool)
    return kind is not None and kind not in own and (_SCHEMA_FIELDS.isdisjoint(tool) or not _is_mistake(kind))


def _is_mistake(kind: str) -> bool:
    return bool(get_close_matches(kind, _FUNCTION_WORDS, n=1, cutoff=_MISTAKE_RATIO))


def is_media(kind: str | None) -> bool:
    """Whether a part of this type holds something besides text."""
    return kind is not None and _MEDIA.search(kind) is not None


def read_part(part: Any, text_type: str) -> Any:
    """`part` as a part of type `text_type` where it holds text in another form; else as it is."""
    text = _text_of(part)
    return part if text is None else {"type": text_type, "text": text}


def noted_part(part: Any, text_type: str, place: str, ignored: dict[str, None]) -> Any:
    """The same for a part of a tool's result: a note takes the place of what can't be read, which is named."""
    part = read_part(part, text_type)
    kind = kind_of(part)
    if kind is None or kind == text_type or "text" in part:
        return part
    ignored[f"{place}[{kind}]"] = None
    name = part.get("tool_name")
    is_named = kind == "tool_reference" and isinstance(name, str)
    note = f"Tool: {name}" if is_named else f"[{kind} left out: this model reads text alone]"
    return {"type": text_type, "text": note}


def _text_of(part: Any) -> str | None:
    match part:
        case {"type": "refusal", "refusal": str(text)} | {"type": "compaction", "content": str(text)}:
            return text
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return _titled(part, ("title", "context"), text)
        case {"type": "document", "source": {"type": "content", "content": content}}:
            return _titled(part, ("title", "context"), _joined(content))
        case {"type": "search_result", "content": content}:
            return _titled(part, ("title", "source"), _joined(content))
        case {"type": "input_file", "file_data": str(data)}:
            return _titled(part, ("filename",), _decoded(data))
        case {"type": "file", "file": {"file_data": str(data)} as file}:
            return _titled(file, ("filename",), _decoded(data))
        case _:
            return None


def _titled(part: Mapping[str, Any], names: tuple[str, ...], text: str | None) -> str | None:
    """A document's text with what the client says of it; None where it isn't text alone."""
    if text is None:
        return None
    said = [value for name in names if isinstance(value := part.get(name), str) and value]
    return "\n".join(("<document>", *said, text, "</document>", ""))


def _joined(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [text for part in content if kind_of(part) == "text" and isinstance(text := part.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(content) else None


def _decoded(data: str) -> str | None:
    """The text of a data URL of text; None where it is none."""
    if (begin := _TEXT_DATA.match(data)) is None:
        return None
    try:
        return base64.b64decode(data[begin.end() :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
