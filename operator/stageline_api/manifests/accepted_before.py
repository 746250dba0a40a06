"""A manifest that an earlier version accepted and this one refuses, read without this version's rules.

What runs was made from it, and has to be made again as it was when it fails. So its values are taken as they stand:
types are followed, limits, patterns and rules between fields are not. A field that this version doesn't know is left
out; whoever asks compares the revision, which tells. Never for a manifest that nothing was made from yet.
"""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from stageline_api.resource.pipeline_model import PipelineModel


def read_accepted_before(manifest: Mapping[str, Any]) -> PipelineModel | None:
    """The model; None where something that this version can't do without is missing or of another shape."""
    try:
        model = _of_type(PipelineModel, manifest)
    except (TypeError, ValueError):
        return None
    return model if isinstance(model, PipelineModel) else None


def _of_type(kind: type[BaseModel], given: Mapping[str, Any]) -> BaseModel:
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        written = field.alias or name
        if given.get(written) is not None:
            values[written] = _value(field.annotation, given[written])
        elif field.is_required():
            raise ValueError(f"{written} is missing")
    return kind.model_construct(**values)


def _value(annotation: Any, given: Any) -> Any:
    """`given` in the form that a field of this annotation holds it in."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(arguments[0], given)
    if origin in (Union, types.UnionType):
        kinds = [each for each in arguments if each is not types.NoneType]
        return _value(kinds[0], given) if len(kinds) == 1 else given
    if origin in (tuple, list) and isinstance(given, list | tuple):
        return origin(_value(arguments[0], each) for each in given)
    if origin is dict and isinstance(given, Mapping):
        return {key: _value(arguments[1], each) for key, each in given.items()}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not isinstance(given, Mapping):
            raise TypeError(f"{annotation.__name__} is not a mapping")
        return _of_type(annotation, given)
    if annotation is str and isinstance(given, int):
        return str(given)  # a quantity may be written as a number
    return given
