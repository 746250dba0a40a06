"""JSON schemas of clients as engines get them: joined into one document, and without words that restrict nothing. Pure.

A schema with an `$id` is a document of its own wherever it lies, and so are its references. What a schema compares with
(`const`, `enum`) is data, whatever it looks like. Generators of schemas write `propertyNames` for every record
(`{"type": "string"}`, as all names are), and compilers of grammars refuse the word. One that restricts names stays and
is refused by the engine, since an answer could not be held to it.
"""

import json
from typing import Any, Final

from stageline_api.json_schema import with_schemas

_WORD: Final = "propertyNames"
_TELLS: Final = frozenset(
    {"$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
"""Keywords that restrict nothing."""


def moved_schema(schema: Any, place: str) -> Any:
    """`schema` with references to its own root (`#`, `#/…`) pointed to `place`, where it now lies."""
    match schema:
        case {"$id": str(own)} if not own.startswith("#"):
            return _document(schema)
        case {"$ref": str(target)} if target == "#" or target.startswith("#/"):
            return with_schemas(schema, lambda one: moved_schema(one, place)) | {"$ref": place + target[1:]}
        case dict():
            return with_schemas(schema, lambda one: moved_schema(one, place))
        case _:
            return schema


def _document(schema: dict[str, Any]) -> dict[str, Any]:
    """Before draft 2019 an `$id` beside a `$ref` says nothing, so the reference becomes a part of its own."""
    if "$ref" not in schema:
        return schema
    others = schema.get("allOf")
    parts = [{"$ref": schema["$ref"]}, *(others if isinstance(others, list) else [])]
    return {key: value for key, value in schema.items() if key != "$ref"} | {"allOf": parts}


def without_idle_names(schema: str | None) -> str | None:
    """`schema`, JSON, without those; as it is where it has none."""
    if schema is None or _WORD not in schema:
        return schema
    try:
        return json.dumps(_mended(json.loads(schema)))
    except (ValueError, RecursionError):
        return schema  # its own check says what is wrong


def _mended(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return with_schemas(
        {key: value for key, value in schema.items() if not (key == _WORD and _is_idle(value))}, _mended
    )


def _is_idle(names: Any) -> bool:
    """Whether every name satisfies the schema `names`: a name is a text of any length."""
    if not isinstance(names, dict):
        return names is True
    rest = {key: value for key, value in names.items() if key not in _TELLS}
    kind, least = rest.pop("type", "string"), rest.pop("minLength", 0)
    takes_texts = kind == "string" or (isinstance(kind, list) and "string" in kind)
    return not rest and takes_texts and least == 0
