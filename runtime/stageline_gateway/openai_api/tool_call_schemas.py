"""JSON schemas that hold an answer to calls of tools: what `tool_choice` "required" and a named function ask for. Pure.

A named function's answer is its arguments alone. A required call's answer is a list of `{"name", "arguments"}`, the
form that `tool_calls` reads back. References inside a tool's parameters are pointed to where the parameters now lie.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, assert_never

from stageline_gateway.openai_api.chat_types import NamedTool, Tool, ToolChoice

MAX_PARALLEL_CALLS: Final = 16
"""Most calls in one answer: a grammar without a bound lets a small model repeat itself to its token limit."""
ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}


def schema_of_calls(tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str | None:
    """The schema of an answer that must call, as JSON; None when it needn't."""
    match choice:
        case "none" | "auto":
            return None
        case "required":
            calls = [_call(tool, f"#/items/anyOf/{index}/properties/arguments") for index, tool in enumerate(tools)]
            most = MAX_PARALLEL_CALLS if parallel else 1
            return json.dumps({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}})
        case NamedTool(function=named):
            chosen = next(tool for tool in tools if tool.function.name == named.name)
            return json.dumps(_parameters(chosen))
        case _:
            assert_never(choice)


def _parameters(tool: Tool) -> dict[str, Any]:
    """Arguments are always an object, also where the tool forgets to say so."""
    return ANY_OBJECT | (tool.function.parameters or {})


def _call(tool: Tool, place: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": _moved(_parameters(tool), place)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """`schema` with references to its own root (`#`, `#/…`) pointed to `place`."""
    match schema:
        case dict():
            return {
                key: place + value[1:]
                if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
                else _moved(value, place)
                for key, value in schema.items()
            }
        case list():
            return [_moved(one, place) for one in schema]
        case _:
            return schema
