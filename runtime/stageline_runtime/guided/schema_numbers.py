"""Finds large numbers in JSON schemas that the library would follow as others: it keeps float64. Pure.

Up to 2**53 each whole number is one of float64. What is beyond would be forced as another number, or bound other ones,
without a word.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from stageline_api.json_schema import schemas_in

LARGEST_EXACT: Final = 2**53
_TOO_LONG: Final = 10**40
_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_COMPARED: Final = frozenset({"const", "enum"})
_HELD_EXACTLY: Final = frozenset({("maximum", 2**63 - 1)})
"""Seen to be followed: the largest number that the library compares with."""


def inexact_number(schema: str) -> str | None:
    """A sentence about the first number in the text of a schema that isn't followed exactly; None where all are.

    A text that is no JSON has none: the library refuses it.
    """
    try:
        found = next(_inexact(json.loads(schema, parse_int=_whole), "#"), None)
    except (ValueError, RecursionError):
        return None
    if found is None:
        return None
    place, value = found
    shown = str(value) if abs(value) < _TOO_LONG else "of that length"
    return f"{place}: the number {shown} is beyond 2**53 and can't be followed exactly"


def _whole(text: str) -> int:
    """Python reads no number of more than 4,300 digits, and nobody needs to see one of a hundred."""
    return int(text) if len(text) <= 40 else _TOO_LONG


def _inexact(schema: Any, place: str) -> Iterator[tuple[str, float]]:
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _COMPARED or key in _BOUNDS:
            yield from ((f"{place}/{key}", one) for one in _numbers(value) if (key, one) not in _HELD_EXACTLY)
    for step, each in schemas_in(schema):
        yield from _inexact(each, f"{place}/{step}")


def _numbers(value: Any) -> Iterator[float]:
    """Numbers in data that float64 may not have; one that is written as a fraction has been rounded already."""
    match value:
        case bool():
            return
        case int() | float() if abs(value) > LARGEST_EXACT:
            yield value
        case list():
            for each in value:
                yield from _numbers(each)
        case dict():
            for each in value.values():
                yield from _numbers(each)
