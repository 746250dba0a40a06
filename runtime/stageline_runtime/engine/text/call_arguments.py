"""Arguments of tool calls in earlier turns, in the form that a model's chat template can use. Pure.

A client sends back the model's own output, which need not be an object: the token limit may have truncated it. Most
templates accept only objects, some only text, some both, and none declares it, so the forms are tried: first the
one that was sent, an object or text.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json

from stageline_api.engine_http import ChatMessage

Arguments = dict[str, Any] | str
WriteArguments = Callable[[Arguments], Arguments]
"""Converts a tool call's arguments to a form for a template."""


def ways_to_write(messages: Sequence[ChatMessage]) -> Sequence[WriteArguments]:
    """Forms to try for the calls of `messages`, one after the other."""
    has_texts = any(isinstance(call.arguments, str) for message in messages for call in message.tool_calls)
    return (as_sent, as_object, as_text) if has_texts else (as_sent, as_text)


def as_sent(arguments: Arguments) -> Arguments:
    """A copy, which the template may change."""
    return arguments if isinstance(arguments, str) else dict(arguments)


def as_object(arguments: Arguments) -> Arguments:
    """Of a text, the object that it is a prefix of; a text that starts no object is a value of its own."""
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        begun = from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        begun = None
    return begun if isinstance(begun, dict) else {"arguments": arguments}


def as_text(arguments: Arguments) -> Arguments:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
