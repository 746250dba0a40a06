"""Tools of `/v1/responses`, and the functions of a chat that they become. Pure.

A chat has no namespaces: a function of one is offered under both names joined, and a call of it is told with the two
apart, as the client declared them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from stageline_gateway.openai_api.chat_types import MAX_TOOLS, OWN_TOOLS, WORD_OR_NAMED, Strict, ToolName
from stageline_gateway.openai_api.known_fields import TOOL_IGNORED
from stageline_gateway.openai_api.unread_parts import Unread, is_server_tool
from stageline_gateway.openai_api.validation import IgnoredFields, lenient, with_each

FUNCTION_TOOL_IGNORED = TOOL_IGNORED | {"output_schema", "async", "async_"}
_SEPARATOR = "__"


class FunctionTool(Strict):
    """A function that may be called; the only kind of tool that is offered to a model here."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _kind_of_function(value: Any) -> str:
    return "#unread" if is_server_tool(value, OWN_TOOLS) else "#tool"


AnyFunction = Annotated[
    Annotated[FunctionTool, Tag("#tool")] | Annotated[Unread, Tag("#unread")], Discriminator(_kind_of_function)
]


class NamespaceTool(Strict):
    """Functions under a name that they share."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[AnyFunction], Field(fail_fast=True, max_length=MAX_TOOLS)]


def _is_namespace(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "namespace"


def _kind_of_tool(value: Any) -> str:
    return "#namespace" if _is_namespace(value) else _kind_of_function(value)


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("#tool")]
    | Annotated[NamespaceTool, Tag("#namespace")]
    | Annotated[Unread, Tag("#unread")],
    Discriminator(_kind_of_tool),
]


def _few_in_all(tools: list[FunctionTool | NamespaceTool | Unread]) -> list[FunctionTool | NamespaceTool | Unread]:
    """A chat offers so many functions; each namespace may hold as many."""
    count = len(offered_functions(tools))
    if count > MAX_TOOLS:
        sentence = "has {count} functions, those in namespaces included, where {most} may be"
        raise PydanticCustomError("too_many_functions", sentence, {"count": count, "most": MAX_TOOLS})
    return tools


ResponseTools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS), AfterValidator(_few_in_all)]


class ChosenFunction(Strict):
    """A choice of one function."""

    type: Literal["function"]
    name: ToolName
    namespace: ToolName | None = None

    @property
    def chat_name(self) -> str:
        """As the chat knows it."""
        return joined_name(self.namespace, self.name)


def _kind_of_choice(value: Any) -> str:
    return "#unread" if is_server_tool(value, OWN_TOOLS | {"namespace"}) else "#tool"


AnyChoice = Annotated[
    Annotated[ChosenFunction, Tag("#tool")] | Annotated[Unread, Tag("#unread")], Discriminator(_kind_of_choice)
]


class AllowedFunctions(Strict):
    """A choice among some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChoice], Field(fail_fast=True, max_length=MAX_TOOLS)]

    @property
    def functions(self) -> list[tuple[int, ChosenFunction]]:
        """Those that can be called, with their indexes."""
        return [(index, one) for index, one in enumerate(self.tools) if isinstance(one, ChosenFunction)]

    def as_chats(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": one.chat_name}} for _, one in self.functions]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("#word")]
    | Annotated[ChosenFunction, Tag("#named")]
    | Annotated[AllowedFunctions, Tag("#allowed")],
    WORD_OR_NAMED,
]


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
        return {"type": "function", "function": self.tool.model_dump(exclude={"type"}) | {"name": self.name}}


def joined_name(namespace: str | None, name: str) -> str:
    """The name of a chat's function for `name` in `namespace`."""
    return name if namespace is None else namespace.removesuffix(_SEPARATOR) + _SEPARATOR + name


def offered_functions(tools: Sequence[FunctionTool | NamespaceTool | Unread]) -> list[Offered]:
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


def left_out_tools(tools: Sequence[FunctionTool | NamespaceTool | Unread]) -> dict[str, str]:
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


def written_tools(tools: Sequence[FunctionTool | NamespaceTool | Unread]) -> list[dict[str, Any]]:
    """What of `tools` can be called, as an answer repeats it."""
    return [
        tool.model_dump() | ({"tools": written_tools(tool.tools)} if isinstance(tool, NamespaceTool) else {})
        for tool in tools
        if not isinstance(tool, Unread)
    ]


def lenient_tool(tool: Any, ignored: IgnoredFields) -> Any:
    """`tool` without hints that change nothing here, which `ignored` names."""
    if _is_namespace(tool):
        tool = lenient(tool, NamespaceTool, TOOL_IGNORED, "tools", ignored)
        return with_each(tool, "tools", MAX_TOOLS, lambda one: lenient_tool(one, ignored))
    if is_server_tool(tool, OWN_TOOLS):
        return tool
    return lenient(tool, FunctionTool, FUNCTION_TOOL_IGNORED, "tools", ignored)
