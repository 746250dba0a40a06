"""Rules between the fields of a chat that types can't say: what each role takes, and how tools may be chosen."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from stageline_gateway.errors import bad_value, shown
from stageline_gateway.openai_api.chat_types import MadeCall, Message, NamedTool, Tool
from stageline_gateway.openai_api.request_types import ChatRequest


def check_messages(messages: list[Message]) -> None:
    """Raise ApiError 400 for a field that its message's role doesn't take, or lacks."""
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        _check_fields(message, place)
        for position, call in enumerate(message.tool_calls or []):
            arguments_of(call, f"{place}.tool_calls[{position}].function.arguments")


def _check_fields(message: Message, place: str) -> None:
    takes = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}.get(message.role, set())
    for name in ("tool_calls", "tool_call_id", "name"):
        if name not in takes and getattr(message, name) is not None:
            param = f"{place}.{name}"
            raise bad_value(param, f"'{param}' is not supported in a message of role '{message.role}'.")
    if message.content is None and message.tool_calls is None:
        _missing(f"{place}.content")
    if message.role == "tool" and message.tool_call_id is None:
        _missing(f"{place}.tool_call_id")


def _missing(param: str) -> None:
    raise bad_value(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def arguments_of(call: MadeCall, param: str) -> dict[str, Any]:
    """The arguments as an object; raises ApiError 400 naming `param`."""
    try:
        value = from_json(call.function.arguments, allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise bad_value(param, f"'{param}' must be a JSON object; got {shown(call.function.arguments)}.")
    return value


def check_tool_names(tools: Sequence[Tool]) -> list[str]:
    """The tools' names; raises ApiError 400 when two are the same."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            param = f"tools[{index}].function.name"
            raise bad_value(param, f"'{param}' = {shown(name)} is the name of an earlier tool.")
    return names


def check_tools(request: ChatRequest) -> None:
    """Raise ApiError 400 for tools that can't be told apart, chosen or combined as asked."""
    names = check_tool_names(request.tools)
    choice = request.tool_choice
    if choice not in (None, "none") and not names:
        raise bad_value("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        param = "tool_choice.function.name"
        raise bad_value(param, f"'{param}' = {shown(choice.function.name)} is none of the tools.")
    if request.offered_tools:
        _check_offered(request)


def _check_offered(request: ChatRequest) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        raise bad_value(
            "response_format", "'response_format' can't be combined with tools; send 'tool_choice': 'none'."
        )
    if request.choice_of_tool != "auto":
        return
    for index in (index for index, tool in enumerate(request.tools) if tool.function.strict):
        param = f"tools[{index}].function.strict"
        message = f"'{param}' = true is only supported with 'tool_choice' 'required' or a named function."
        raise bad_value(param, message, "unsupported_parameter")
