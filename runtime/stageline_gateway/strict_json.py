"""JSON of clients: as RFC 8259 has it, no deeper than anything that recurses over it can follow."""

from itertools import chain
from typing import Any, Final

import msgspec

MAX_DEPTH: Final = 200
"""Objects and lists inside of each other."""


def parse_json(raw: bytes | bytearray | str) -> Any:
    """The value of `raw`. Raises ValueError: malformed, not UTF-8, a number beyond a double's range, or too deep."""
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if _has_many_openings(raw) and _is_too_deep(value):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    return value


def _has_many_openings(raw: bytes | bytearray | str) -> bool:
    if isinstance(raw, str):
        return raw.count("{") + raw.count("[") > MAX_DEPTH
    return raw.count(b"{") + raw.count(b"[") > MAX_DEPTH


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        within = chain.from_iterable(one.values() if isinstance(one, dict) else one for one in level)
        level = [one for one in within if type(one) is dict or type(one) is list]
        if not level:
            return False
    return True
