"""A request as the engine reads it: JSON of only what it says beyond the defaults.

`GenerateRequest.model_validate_json` of it is the request. That only little is looked at and written counts here: this
runs once in a request, when hardly anything of it is in the processor's caches, and pydantic's own way through its
schema costs ten times as much then.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from stageline_api.engine_http import GenerateRequest

_ALWAYS_WRITTEN: Final = frozenset({"kind", "sampling"})
"""What tells kinds of prompts apart, though each has its own for a default; and what would be compared in whole."""
_NO_DEFAULT: Final = object()


def written(request: GenerateRequest) -> bytes:
    """`request` as one line of JSON, without the line's end."""
    return _encoder.encode(_said(request))


@cache
def _defaults(model: type[BaseModel]) -> Mapping[str, Any]:
    fields = model.model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required() and name not in _ALWAYS_WRITTEN}


def _said(model: Any) -> dict[str, Any]:
    """The fields of `model` whose values are not their defaults."""
    if not isinstance(model, BaseModel):
        raise TypeError(f"{type(model).__name__} has no form in JSON")
    default = _defaults(type(model)).get
    return {name: value for name, value in model.__dict__.items() if value != default(name, _NO_DEFAULT)}


_encoder: Final = msgspec.json.Encoder(enc_hook=_said)
