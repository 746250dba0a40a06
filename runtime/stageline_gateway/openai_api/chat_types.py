"""The parts of a chat's body: messages and tools as types, and the rules between fields that types can't express."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from stageline_api.engine_http import MAX_MESSAGES
from stageline_gateway.errors import bad_value, shown, wrong_value
from stageline_gateway.openai_api.checked_types import OneOf, Strict
from stageline_gateway.openai_api.unread_parts import Unread, is_server_tool
from stageline_gateway.strict_json import parse_json

OWN_TOOLS: Final = frozenset({"function"})
"""Types of tools that can be called."""
MAX_TOOLS = 128
"""OpenAI's bound."""
MAX_ID_CHARACTERS = 128
MAX_NAME_CHARACTERS = 128
"""Of a tool, as Anthropic and `/v1/responses` have it."""
MAX_PARTS = 1024
"""Of one message's content."""

ToolName = Annotated[str, Meta(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARACTERS}}}$(?!\n)")]


class CalledFunction(Strict, frozen=True):
    """What an earlier turn called; `arguments` is a JSON object, written as a string, or whatever the model wrote."""

    name: ToolName
    arguments: str


class MadeCall(Strict, frozen=True, kw_only=True):
    """A call in an earlier turn of the assistant."""

    id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(Strict, frozen=True):
    """A function that may be called. `strict` holds its arguments to `parameters`, which a forced call always does."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict, frozen=True):
    """A tool; only functions exist here."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict, frozen=True):
    """The function to call."""

    name: ToolName


class AnyChoice(OneOf):
    """One of the tools that may be called; what names no function is left out."""

    @classmethod
    def struct_of(cls, value: Any) -> type[Strict | Unread]:
        return UnreadChoice if is_server_tool(value, OWN_TOOLS) else NamedTool


class NamedTool(Strict, AnyChoice, tag_field="type", tag="function", frozen=True):
    """A choice of one tool."""

    function: NamedFunction


class UnreadChoice(Unread, AnyChoice, frozen=True):
    """A choice of what can't be called."""


class AllowedList(Strict, frozen=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChoice], Meta(max_length=MAX_TOOLS)]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools if isinstance(tool, NamedTool))


class AllowedTools(Strict, tag_field="type", tag="allowed_tools", frozen=True):
    """A choice among some of the tools."""

    allowed_tools: AllowedList


Mode = Literal["none", "auto", "required"]
ChosenTool = Mode | NamedTool
ToolChoice = Mode | NamedTool | AllowedTools


class TextPart(Strict, frozen=True):
    """One part of a message's content; only text can be read by the models served here."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


class Message(Strict, frozen=True):
    """One turn. Fields that a client repeats from an earlier answer may be there as long as they are null.

    Which fields a role takes is checked by `check_messages`, so that the error can name the one that is wrong.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: Annotated[list[MadeCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)] | None = None
    name: ToolName | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None

    @property
    def thoughts(self) -> str | None:
        """What the assistant thought, under either name that servers give it."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def text(self) -> str:
        """The content as one string; parts are joined without a separator, as they would be read."""
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


def check_messages(messages: list[Message]) -> None:
    """Raise ApiError 400 for a field that its message's role doesn't take, or lacks."""
    for index, message in enumerate(messages):
        _check_fields(message, f"messages[{index}]")


def _check_fields(message: Message, place: str) -> None:
    takes = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}}.get(message.role, set())
    for name in ("tool_calls", "tool_call_id", "name"):
        if name not in takes and getattr(message, name) not in (None, []):
            raise bad_value(f"{place}.{name}", f"is not supported in a message of role '{message.role}'")
    # An answer that the token limit cut off before there was anything to tell has neither words nor calls, and a tool
    # may have nothing to say.
    if message.role not in ("assistant", "tool"):
        if message.content is None:
            _missing(f"{place}.content")
        if message.content == []:
            raise wrong_value(f"{place}.content", "should have at least 1 part", [])
    if message.role == "tool" and message.tool_call_id is None:
        _missing(f"{place}.tool_call_id")


def _missing(param: str) -> None:
    raise bad_value(param, "is missing", "missing_required_parameter")


def arguments_of(call: MadeCall) -> dict[str, Any] | str:
    """The arguments as an object, or as they are written where that is none.

    What the token limit cut off comes back in the next turn, and OpenAI takes any text: a refusal would end a chat
    whose client did nothing wrong. Clients write a call without arguments as nothing, or as null.
    """
    written = call.function.arguments
    if not written.strip():
        return {}
    try:
        value = parse_json(written)
    except ValueError:
        return written
    if value is None:
        return {}
    return value if isinstance(value, dict) else written


def check_tool_names(tools: Sequence[Tool]) -> list[str]:
    """The tools' names; raises ApiError 400 when two are the same."""
    names = [tool.function.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise bad_value(f"tools[{index}].function.name", f"= {shown(name)} is the name of an earlier tool")
    return names


def written_json(fields: Mapping[str, Any]) -> Iterator[str]:
    """JSON that the fields of a body hold inside of strings, and that is read as well: arguments of calls in earlier
    turns, in the order in which they are read, and a schema.

    What has another form than a chat's or a response's is passed over: its own check says what is wrong.
    """
    for message in _objects(fields.get("messages")):
        for call in _objects(message.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
                yield text
    for item in _objects(fields.get("input")):
        if isinstance(text := item.get("arguments"), str):
            yield text
    guide = fields.get("structured_outputs")
    for schema in (fields.get("guided_json"), guide.get("json") if isinstance(guide, dict) else None):
        if isinstance(schema, str):
            yield schema


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    return (each for each in value if isinstance(each, dict)) if isinstance(value, list) else iter(())
