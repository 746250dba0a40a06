"""What a request's body takes in memory: told from its bytes before it is parsed, and of its texts afterwards. Pure.

`{},` is three bytes and becomes a dictionary, a checked object and a part of the engine's request, so objects and
values are counted by their marks. Python keeps a text with as many bytes for each character as its widest needs: one,
two or four, so one emoji makes four megabytes of ASCII sixteen. Beside one that isn't ASCII it keeps the UTF-8 once
somebody has asked for that, which checking and writing a request do.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.chat_types import written_json

MOST_OBJECTS: Final = 32 * 1024
"""Objects and lists of one body: many times those of the longest chat with the most tools."""
MOST_VALUES: Final = 1024 * 1024
"""Values of one body, the ids of a prompt among them."""
OBJECT_BYTES: Final = 1024
"""What one object or list holds at most, over all forms that it is in at once."""
MOST_STRINGS: Final = 128 * 1024
"""Strings of one body, names of fields among them."""
VALUE_BYTES: Final = 48
"""A number in a list, in the same sense."""
OBJECT_WORK_BYTES: Final = 512
"""An object or list takes as long to parse and check as so many bytes of text, 20 µs."""
VALUE_WORK_BYTES: Final = 4
"""A number in a list, in the same sense."""
FEW: Final = 128
"""As many marks in a body, inside strings or not, need no closer look."""
SHORT: Final = 64
"""Texts of up to so many characters are taken for as wide as they can be."""
_ESCAPE: Final = b"\\u"
_HALF_OF_A_PAIR: Final = re.compile(rb"\\u[dD][89abAB]")
_FOUR_BYTES: Final = tuple(bytes([first]) for first in range(0xF0, 0xF5))
"""What the UTF-8 of a character begins with that takes four bytes; Python has four for it, too."""
_OF_ONE_BYTE: Final = bytes([*range(0xC4), *range(0xF5, 0x100)])
"""The UTF-8 of characters for which Python has one byte is made of these."""
_CONTINUED: Final = bytes(range(0x80, 0xC0))


class BodyShape(NamedTuple):
    """How many objects and lists a body has, and how many values; both may be too high where there are `FEW`."""

    objects: int
    values: int

    @property
    def extra_bytes(self) -> int:
        """What it will hold beyond its text."""
        return self.objects * OBJECT_BYTES + self.values * VALUE_BYTES

    @property
    def work_bytes(self) -> int:
        """The bytes of text that take as long to parse and check, beside its own."""
        return self.objects * OBJECT_WORK_BYTES + self.values * VALUE_WORK_BYTES


def shape_of(raw: bytes | bytearray) -> BodyShape:
    """The shape of `raw`, which need not be JSON.

    Raises:
        ApiError: 400; it has more strings than any request needs.
    """
    found = _count(raw)
    if found.objects + found.values <= FEW:
        return found
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * MOST_STRINGS:
        raise _too_complex(f"The body has more than {MOST_STRINGS} strings.")
    return _count(b"".join(plain.split(b'"')[::2]))


def shape_with_written(shape: BodyShape, fields: Mapping[str, Any]) -> BodyShape:
    """`shape` of a body, and in it that of the JSON which its strings hold and which is read as well.

    Raises:
        ApiError: as `shape_of`.
    """
    # In one piece: few marks in each of many texts are many.
    written = ",".join(map(_with_its_last_string_ended, written_json(fields)))
    if not written:
        return shape
    inner = shape_of(written.encode(errors="surrogatepass"))
    return BodyShape(shape.objects + inner.objects, shape.values + inner.values)


def _with_its_last_string_ended(text: str) -> str:
    """Calls that were cut off are taken as they are: a string that is open there must not count what is behind it as
    its own."""
    plain = text.replace("\\\\", "").replace('\\"', "")
    return text if plain.count('"') % 2 == 0 else plain.replace("\\", "") + '"'


def check_shape(shape: BodyShape) -> None:
    """Raise ApiError 400 for a body of more parts than any request needs."""
    if shape.objects > MOST_OBJECTS:
        raise _too_complex(f"The body has {shape.objects} objects and lists; at most {MOST_OBJECTS} are allowed.")
    if shape.values > MOST_VALUES:
        raise _too_complex(f"The body has more than {MOST_VALUES} values.")


def _count(raw: bytes | bytearray) -> BodyShape:
    objects = raw.count(b"{") + raw.count(b"[")
    return BodyShape(objects, raw.count(b",") + objects)


def _too_complex(message: str) -> ApiError:
    return ApiError(400, message, code="body_too_complex")


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
        elif isinstance(part, msgspec.Struct):
            parts.extend(getattr(part, name) for name in part.__struct_fields__)


def _are_ids(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether they are numbers and nothing else: there may be a million."""
    return bool(values) and type(values[0]) is int and set(map(type, values)) == {int}
