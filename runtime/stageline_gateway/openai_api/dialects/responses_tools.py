"""Tools of `/v1/responses`, and the functions of a chat that they become. Pure.

A chat has no namespaces: a function of one is offered under both names joined, and a call of it is told with the two
apart, as the client declared them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, structs

from stageline_gateway.openai_api.chat_types import MAX_TOOLS, OWN_TOOLS, Mode, ToolName
from stageline_gateway.openai_api.checked_types import OneOf, Strict
from stageline_gateway.openai_api.known_fields import TOOL_IGNORED
from stageline_gateway.openai_api.unread_parts import Unread, is_server_tool
from stageline_gateway.openai_api.validation import IgnoredFields, lenient, with_each

FUNCTION_TOOL_IGNORED = TOOL_IGNORED | {"output_schema", "async", "async_"}
_SEPARATOR = "__"


class AnyTool(OneOf):
    """A tool, or functions under a name that they share; what can't be called is left out."""

    @classmethod
    def struct_of(cls, value: Any) -> type[Strict | Unread]:
        return NamespaceTool if _is_namespace(value) else AnyFunction.struct_of(value)


class AnyFunction(AnyTool):
    """A tool of a namespace."""

    @classmethod
    def struct_of(cls, value: Any) -> type[Strict | Unread]:
        return UnreadResponseTool if is_server_tool(value, OWN_TOOLS) else FunctionTool


class FunctionTool(Strict, AnyFunction, frozen=True):
    """A function that may be called; the only kind of tool that is offered to a model here."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class UnreadResponseTool(Unread, AnyFunction, frozen=True):
    """A tool that can't be called."""


class NamespaceTool(Strict, AnyTool, frozen=True):
    """Functions under a name that they share."""

    type: Literal["namespace"]
    name: ToolName
    tools: Annotated[list[AnyFunction], Meta(max_length=MAX_TOOLS)]
    description: str | None = None


def _is_namespace(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "namespace"


ResponseTools = Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)]


class AnyChoice(OneOf):
    """One of the functions that may be called; what names none is left out."""

    @classmethod
    def struct_of(cls, value: Any) -> type[Strict | Unread]:
        return UnreadResponseChoice if is_server_tool(value, OWN_TOOLS | {"namespace"}) else ChosenFunction


class UnreadResponseChoice(Unread, AnyChoice, frozen=True):
    """A choice of what can't be called."""


class ChosenFunction(Strict, AnyChoice, omit_defaults=True, tag_field="type", tag="function", frozen=True):
    """A choice of one function."""

    name: ToolName
    namespace: ToolName | None = None

    @property
    def chat_name(self) -> str:
        """As the chat knows it."""
        return joined_name(self.namespace, self.name)


class AllowedFunctions(Strict, tag_field="type", tag="allowed_tools", frozen=True):
    """A choice among some of the functions."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChoice], Meta(max_length=MAX_TOOLS)]

    @property
    def functions(self) -> list[tuple[int, ChosenFunction]]:
        """Those that can be called, with their indexes."""
        return [(index, one) for index, one in enumerate(self.tools) if isinstance(one, ChosenFunction)]

    def as_chats(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": one.chat_name}} for _, one in self.functions]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


ResponseToolChoice = Mode | ChosenFunction | AllowedFunctions


class Offered(NamedTuple):
    """A function that the chat offers, and where the client declared it."""

    place: str
    tool: FunctionTool
    namespace: str | None = None

    @property
    def name(self) -> str:
        """As the chat knows it."""
        return joined_name(self.namespace, self.tool.name)

    def as_chats(self) -> dict[str, Any]:
        function = {**structs.asdict(self.tool), "name": self.name}
        del function["type"]
        return {"type": "function", "function": function}


def joined_name(namespace: str | None, name: str) -> str:
    """The name of a chat's function for `name` in `namespace`."""
    return name if namespace is None else namespace.removesuffix(_SEPARATOR) + _SEPARATOR + name


def offered_functions(tools: Sequence[AnyTool]) -> list[Offered]:
    """The functions of `tools`, also those in namespaces."""
    found: list[Offered] = []
    for index, tool in enumerate(tools):
        match tool:
            case FunctionTool():
                found.append(Offered(f"tools[{index}]", tool))
            case NamespaceTool(name=name, tools=inner):
                functions = ((number, one) for number, one in enumerate(inner) if isinstance(one, FunctionTool))
                found += [Offered(f"tools[{index}].tools[{number}]", one, name) for number, one in functions]
            case Unread():
                pass
    return found


def left_out_tools(tools: Sequence[AnyTool]) -> dict[str, str]:
    """Names of what of `tools` reaches no model -> its type, or its words."""
    found: dict[str, str] = {}
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            found |= left_out_tools(tool.tools)
            if tool.description:
                found["tools[namespace].description"] = tool.description
        elif isinstance(tool, Unread):
            found[f"tools[{tool.type}]"] = tool.type
    return found


def written_tools(tools: Sequence[AnyTool]) -> list[dict[str, Any]]:
    """What of `tools` can be called, as an answer repeats it."""
    return [
        structs.asdict(tool) | ({"tools": written_tools(tool.tools)} if isinstance(tool, NamespaceTool) else {})
        for tool in tools
        if isinstance(tool, Struct) and not isinstance(tool, Unread)
    ]


def lenient_tool(tool: Any, ignored: IgnoredFields) -> Any:
    """`tool` without hints that change nothing here, which `ignored` names."""
    if _is_namespace(tool):
        tool = lenient(tool, NamespaceTool, TOOL_IGNORED, "tools", ignored)
        return with_each(tool, "tools", MAX_TOOLS, lambda one: lenient_tool(one, ignored))
    if is_server_tool(tool, OWN_TOOLS):
        return tool
    return lenient(tool, FunctionTool, FUNCTION_TOOL_IGNORED, "tools", ignored)
