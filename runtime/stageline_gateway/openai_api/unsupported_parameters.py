"""OpenAI parameters whose meaning isn't built here: refused by name, unless the value asks for nothing.

`best_of: 1` or `tools: []` say what a request without the field says, so clients that always send their defaults work.
Any other value would be ignored silently, which is worse than a refusal. Null counts as absent.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from stageline_gateway.errors import bad_value, shown

_COMMON: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}

CHAT_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    _COMMON
    | {
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "moderation": (),
    }
)
"""Chat parameter -> values that ask for nothing."""

COMPLETION_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(_COMMON | {"echo": (False,), "suffix": ()})
"""Completion parameter -> values that ask for nothing."""


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # Types are compared too: Python's True == 1 would let `n: true` pass.
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


def without_unsupported(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """`fields` without the parameters that ask for nothing.

    Raises ApiError 400, naming the parameter, for one that asks for something this server can't do.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in neutral:
            kept[name] = value
        elif not _is_neutral(value, neutral[name]):
            rule = f"leave it out or send {neutral[name][0]!r}" if neutral[name] else "leave it out"
            message = f"'{name}' = {shown(value)} is not supported by this server: {rule}."
            raise bad_value(name, message, "unsupported_parameter")
    return kept
