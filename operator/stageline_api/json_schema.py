"""Where a client's JSON schema has nested schemas, as opposed to data, which may look like one. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_DATA: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords that contain data."""
_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords that contain schemas by the client's own names, which may equal keywords."""


def schemas_in(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The direct children of `schema` that may be schemas, each with its place."""
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
    """`schema` with `change` applied to each of those children."""
    return {key: _changed(key, value, change) for key, value in schema.items()}


def _changed(key: str, value: Any, change: Callable[[Any], Any]) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: change(each) for name, each in value.items()}
    return [change(each) for each in value] if isinstance(value, list) else change(value)
