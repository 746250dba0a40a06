"""Where the schemas lie in a client's JSON schema, and where data does, which may look like one. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_DATA: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords that hold values."""
_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords that hold schemas by names of the client's own, which may be those of keywords."""


def schemas_in(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What right inside of `schema` may be a schema, each with its place there."""
    for key, value in schema.items():
        if key in _DATA:
            continue
        if key in _BY_NAME and isinstance(value, dict):
            yield from ((f"{key}/{name}", each) for name, each in value.items())
        elif isinstance(value, list):
            yield from ((f"{key}/{index}", each) for index, each in enumerate(value))
        else:
            yield key, value


def with_schemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """`schema` with what `change` makes of each of those."""
    return {key: _changed(key, value, change) for key, value in schema.items()}


def _changed(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    return [change(each) for each in value] if isinstance(value, list) else change(value)
