"""What texts take in memory. Pure.

Python keeps a text with as many bytes for each character as its widest needs: one, two or four, so one emoji makes four
megabytes of ASCII sixteen. Beside one that isn't ASCII it keeps the UTF-8 once somebody has asked for that, which
checking and writing a request do.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from pydantic import BaseModel

SHORT: Final = 64
"""Texts of up to so many characters are taken for as wide as they can be."""
_ESCAPE: Final = b"\\u"
_HALF_OF_A_PAIR: Final = re.compile(rb"\\u[dD][89abAB]")
_FOUR_BYTES: Final = tuple(bytes([first]) for first in range(0xF0, 0xF5))
"""What the UTF-8 of a character begins with that takes four bytes; Python has four for it, too."""
_OF_ONE_BYTE: Final = bytes([*range(0xC4), *range(0xF5, 0x100)])
"""The UTF-8 of characters for which Python has one byte is made of these."""
_CONTINUED: Final = bytes(range(0x80, 0xC0))


def most_text_bytes(raw: bytes | bytearray) -> int:
    """What all strings of a JSON body take at most, each of them once. `raw` need not be JSON."""
    escapes = raw.count(_ESCAPE)
    if raw.isascii() and not escapes:
        return len(raw)
    if escapes:  # a backslash that stands for itself, and a `u` behind it, are none
        escapes = raw.replace(b"\\\\", b"").count(_ESCAPE)
    characters = len(raw.translate(None, _CONTINUED)) - 5 * escapes
    return _width(raw, escapes) * characters + len(raw)


def _width(utf8: bytes | bytearray, escapes: int) -> int:
    """Bytes for each character of a text with this UTF-8, of which so much is written as escapes of JSON."""
    is_widest = any(first in utf8 for first in _FOUR_BYTES) or (escapes and _HALF_OF_A_PAIR.search(utf8))
    if is_widest:
        return 4
    return 2 if escapes or utf8.translate(None, _OF_ONE_BYTE) else 1


def text_bytes(text: str) -> int:
    """What one text takes, its UTF-8 included."""
    if text.isascii():
        return len(text)
    if len(text) <= SHORT:
        return sys.getsizeof(text) + 4 * len(text)
    utf8 = text.encode(errors="surrogatepass")
    return _width(utf8, 0) * len(text) + len(utf8)


def held_text_bytes(*parts: object) -> int:
    """What all texts in `parts` take, and in what these are made of; each counts once, wherever it is."""
    texts = {id(text): text for text in _texts(list(parts))}
    return sum(map(text_bytes, texts.values()))


def _texts(parts: list[Any]) -> Iterator[str]:
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            yield from (name for name in part if isinstance(name, str))
            parts.extend(part.values())
        elif isinstance(part, list | tuple):
            if not _are_ids(part):
                parts.extend(part)
        elif isinstance(part, BaseModel):
            parts.extend(part.__dict__.values())
        elif isinstance(part, msgspec.Struct):
            parts.extend(getattr(part, name) for name in part.__struct_fields__)


def _are_ids(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether they are numbers and nothing else: there may be a million."""
    return bool(values) and type(values[0]) is int and set(map(type, values)) == {int}
