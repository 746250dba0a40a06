"""A request as the engine reads it: JSON of only what it says beyond the defaults.

`GenerateRequest.model_validate_json` of it is the request. That only little is looked at and written counts here: this
runs once in a request, when hardly anything of it is in the processor's caches, and pydantic's own way through its
schema costs ten times as much then.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from stageline_api.engine_http import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    ToolFunction,
)

_ALWAYS_WRITTEN: Final = frozenset({"kind", "sampling"})
"""What tells kinds of prompts apart, though each has its own for a default; and what would be compared in whole."""
_NO_DEFAULT: Final = object()


def _defaults(model: type[BaseModel]) -> Mapping[str, Any]:
    fields = model.model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required() and name not in _ALWAYS_WRITTEN}


_DEFAULTS: Final[Mapping[type, Mapping[str, Any]]] = {
    model: _defaults(model)
    for model in (
        GenerateRequest,
        TextPrompt,
        TokenPrompt,
        ChatPrompt,
        ChatMessage,
        ToolCall,
        ToolFunction,
        SamplingParams,
    )
}
"""Of all that a request has parts of. Found by type: pydantic's `isinstance` is a function of its own."""


def written(request: GenerateRequest) -> bytes:
    """`request` as one line of JSON, without the line's end."""
    return _encoder.encode(_said(request))


def _said(part: Any) -> dict[str, Any]:
    """The fields of a part of a request whose values are not their defaults."""
    default = _DEFAULTS[type(part)].get
    return {
        name: value
        for name, value in part.__dict__.items()
        # Nearly all are the very default.
        if value is not (usual := default(name, _NO_DEFAULT)) and value != usual
    }


_encoder: Final = msgspec.json.Encoder(enc_hook=_said)
