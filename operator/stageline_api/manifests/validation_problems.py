"""Turns pydantic's errors on a manifest into `FieldProblem`s that a user can act on.

The messages are Stageline's own, so that they don't change with the library's version.
"""

import difflib
import re
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stageline_api.resource.field_problem import FieldProblem, show_value

_WRONG_TYPE: Final = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "string_type": "must be a string; put it in quotes",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping of fields",
    "model_attributes_type": "must be a mapping of fields",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
}
_BOUNDS: Final = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be one of {expected}",
}
_UNSHOWN: Final = re.compile(r"\.env\[\d+\]\.value$")
"""Paths with a value that may be a secret by mistake: it is never printed or logged."""


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[FieldProblem]:
    """Every problem that pydantic found while it validated `model`, in its order."""
    problems: list[FieldProblem] = []
    for details in error.errors(include_url=False):
        problems.extend(_problems_of_one(details, model))
    return problems


def render_path(location: Iterable[int | str]) -> str:
    """`("spec", "stages", 1, "layers")` as `spec.stages[1].layers`; a key that is no plain word is quoted."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", part):
            path += f".{part}" if path else part
        else:
            path += f"[{show_value(part)}]"
    return path


def _problems_of_one(details: ErrorDetails, model: type[BaseModel]) -> list[FieldProblem]:
    context = details.get("ctx", {})
    location, value = details["loc"], show_value(details["input"])
    match details["type"]:
        case "fields_disagree":
            return list(context["problems"])
        case "at_field":
            return [FieldProblem(path=render_path((*location, *context["at"])), rule=context["rule"])]
        case "missing":
            return [FieldProblem(path=render_path(location), rule="is required")]
        case "extra_forbidden":
            return [FieldProblem(path=render_path(location), rule=_unknown_field(location, model))]
        case "value_error":
            rule = str(context["error"])
        case kind if kind in _WRONG_TYPE:
            rule = _WRONG_TYPE[kind]
        case kind if kind in _BOUNDS:
            rule = _BOUNDS[kind].format(**context).replace("'", '"')
        case _:
            rule = details["msg"]
    path = render_path(location)
    return [FieldProblem(path=path, value=None if _UNSHOWN.search(path) else value, rule=rule)]


def _unknown_field(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    known = _known_fields(location[:-1], model)
    near = difflib.get_close_matches(str(location[-1]).replace("_", "").lower(), [name.lower() for name in known], n=1)
    for name in known:
        if near and name.lower() == near[0]:
            return f'unknown field; did you mean "{name}"?'
    return f"unknown field; the fields here are {', '.join(known)}" if known else "unknown field"


def _known_fields(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Field names of the type at `location` below `model`."""
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int) or current is None:
            continue  # the type of a list's entries was found when its field was passed
        by_alias = {field.alias or name: field.annotation for name, field in current.model_fields.items()}
        current = _model_within(by_alias.get(part))
    return [] if current is None else [field.alias or name for name, field in current.model_fields.items()]


def _model_within(annotation: Any) -> type[BaseModel] | None:
    """The model type inside an optional, annotated or tuple type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Annotated, Union, UnionType, tuple, list):
        for argument in get_args(annotation):
            found = None if argument in (NoneType, Ellipsis) else _model_within(argument)
            if found is not None:
                return found
    return None
