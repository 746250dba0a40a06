"""The body of Anthropic's `/v1/messages`, checked, and as the fields of a chat that answers it. Pure."""

import json
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, field

from stageline_api.engine_http import MAX_MESSAGES
from stageline_gateway.openai_api.chat_types import (
    MAX_ID_CHARACTERS,
    MAX_PARTS,
    MAX_TOOLS,
    ToolName,
)
from stageline_gateway.openai_api.checked_types import OneOf, Strict
from stageline_gateway.openai_api.client_names import ClientNames
from stageline_gateway.openai_api.known_fields import TOOL_IGNORED, VLLM_KNOWN, Fate, Known
from stageline_gateway.openai_api.request_types import CarriedToChat, StopString, TokenCount
from stageline_gateway.openai_api.unread_parts import (
    Unread,
    is_media,
    is_server_tool,
    kind_of,
    noted_part,
    read_part,
)
from stageline_gateway.openai_api.validation import IgnoredFields, lenient, with_each

MESSAGES_KNOWN: Final[Mapping[str, Known]] = MappingProxyType(
    dict(VLLM_KNOWN)
    | {
        "metadata": Known(Fate.IGNORED, ({},)),
        "service_tier": Known(Fate.IGNORED, ("auto", "standard_only")),
        "cache_control": Known(Fate.IGNORED),
        "context_management": Known(Fate.IGNORED),
        "inference_geo": Known(Fate.IGNORED),
        "speed": Known(Fate.IGNORED, ("standard",)),
        "diagnostics": Known(Fate.IGNORED),
        "user_profile_id": Known(Fate.IGNORED),
        "workspace_id": Known(Fate.IGNORED),
        "container": Known(Fate.REFUSED, (), "Nothing is run here."),
        "mcp_servers": Known(Fate.REFUSED, ([],), "Nothing is called from here."),
        "stop": Known(Fate.REFUSED, ([],), "Send it as 'stop_sequences'."),
    }
)
"""What becomes of fields that are no part of `MessagesRequest`."""
BLOCK_IGNORED: Final = frozenset({"cache_control", "citations", "caller", "toolset_name", "parsed_output"})
"""Of a block of `system` or of a turn's content. A tool's are `known_fields.TOOL_IGNORED`."""

OWN_TOOLS: Final = frozenset({"custom", "function"})
"""Types of functions; OpenAI's word for them is a mistake here, not a tool of a server."""
ToolId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]


_OF_SERVERS: Final = ("_tool_use", "_tool_result")
"""Ends of types of blocks that Anthropic's own servers write: searches, fetched pages, code that they ran."""
_UNREAD: Final = frozenset({"compaction", "fallback", "tool_reference"})


class Block(OneOf):
    """A block of a turn's content."""

    kinds = "a block of type text, tool_use, tool_result or thinking"

    @classmethod
    def struct_of(cls, value: Any) -> type[Strict | Unread] | None:
        kind = kind_of(value)
        if kind is None or kind in _BLOCKS:
            return None if kind is None else _BLOCKS[kind]
        if is_media(kind):
            return TextBlock  # whose error says that only text can be read
        return UnreadBlock if kind in _UNREAD or kind.endswith(_OF_SERVERS) else None


class TextBlock(Strict, Block, frozen=True):
    """Words."""

    type: Literal["text"]
    text: str


Texts = str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]


class ToolUse(Strict, Block, frozen=True):
    """A call that the assistant made in an earlier turn."""

    type: Literal["tool_use"]
    id: ToolId
    name: ToolName
    input: dict[str, Any]


class ToolResult(Strict, Block, frozen=True):
    """What a call gave; an error reaches the model as text that begins with `Error: `."""

    type: Literal["tool_result"]
    tool_use_id: ToolId
    content: Texts | None = None
    is_error: bool = False


class Thinking(Strict, Block, frozen=True):
    """What the assistant thought in an earlier turn; the model's template decides whether it is shown again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class UnreadBlock(Unread, Block, frozen=True):
    """A block that is left out."""


_BLOCKS: Final[Mapping[str, type[Strict]]] = MappingProxyType(
    {
        "text": TextBlock,
        "tool_use": ToolUse,
        "tool_result": ToolResult,
        "thinking": Thinking,
        "redacted_thinking": Thinking,
    }
)


class Turn(Strict, frozen=True):
    """One turn. It may have no block, as an answer has none of which the token limit left only a part of a call."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_PARTS)]


class AnyTool(OneOf):
    """A tool; what can't be called is left out."""

    @classmethod
    def struct_of(cls, value: Any) -> type[Strict | Unread]:
        return UnreadTool if is_server_tool(value, OWN_TOOLS) else CustomTool


class UnreadTool(Unread, AnyTool, frozen=True):
    """A tool of Anthropic's own servers, or of another kind that can't be called."""


class CustomTool(Strict, AnyTool, kw_only=True, frozen=True):
    """A function that may be called; the only kind of tool that is offered to a model here."""

    name: ToolName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Strict, frozen=True):
    """Which tool to call; `name` goes with `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Strict, frozen=True):
    """Whether to think first. How much can't be held to, and thoughts are shown as they are."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Strict, frozen=True):
    """A schema that the answer's text satisfies."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = field(name="schema")


class OutputConfig(Strict, frozen=True):
    """How much to think, and the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesRequest(CarriedToChat, kw_only=True, frozen=True):
    """Body of `POST /v1/messages`."""

    model: str
    max_tokens: TokenCount
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] = field(default_factory=list)
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool = False
    tools: Annotated[list[AnyTool], Meta(max_length=MAX_TOOLS)] = field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    @property
    def functions(self) -> list[tuple[int, CustomTool]]:
        """The tools that can be called, with their indexes."""
        return [(index, tool) for index, tool in enumerate(self.tools) if isinstance(tool, CustomTool)]

    @property
    def left_out(self) -> dict[str, str]:
        """Names of tools and blocks that are left out -> their types."""
        tools = {f"tools[{tool.type}]": tool.type for tool in self.tools if isinstance(tool, Unread)}
        blocks = (block for turn in self.messages if isinstance(turn.content, list) for block in turn.content)
        return tools | {f"messages.content[{one.type}]": one.type for one in blocks if isinstance(one, Unread)}


def with_text_read(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with text that stands in blocks of other types as blocks of text."""
    return with_each(fields, "messages", MAX_MESSAGES, lambda turn: with_each(turn, "content", MAX_PARTS, _text_read))


def _text_read(block: Any) -> Any:
    block = read_part(block, "text")
    return with_each(block, "content", MAX_PARTS, _text_read) if kind_of(block) == "tool_result" else block


def without_hints(fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    """`fields` without hints for a cache and the like in their parts; `ignored` is told of them."""
    fields = with_each(fields, "system", MAX_PARTS, lambda block: _lenient_block(block, "system", ignored))
    fields = with_each(
        fields,
        "tools",
        MAX_TOOLS,
        lambda tool: (
            tool if is_server_tool(tool, OWN_TOOLS) else lenient(tool, CustomTool, TOOL_IGNORED, "tools", ignored)
        ),
    )
    return with_each(fields, "messages", MAX_MESSAGES, lambda turn: _lenient_turn(turn, ignored))


def _lenient_turn(turn: Any, ignored: IgnoredFields) -> Any:
    turn = lenient(turn, Turn, frozenset(), "messages", ignored)
    return with_each(turn, "content", MAX_PARTS, lambda block: _lenient_block(block, "messages.content", ignored))


def _lenient_block(block: Any, place: str, ignored: IgnoredFields) -> Any:
    struct = Block.struct_of(block)
    if struct is None or struct is UnreadBlock:
        return block
    block = lenient(block, struct, BLOCK_IGNORED, place, ignored)
    if struct is not ToolResult:
        return block
    return with_each(block, "content", MAX_PARTS, lambda part: _lenient_result_part(part, place, ignored))


def _lenient_result_part(part: Any, place: str, ignored: IgnoredFields) -> Any:
    return noted_part(lenient(part, TextBlock, BLOCK_IGNORED, place, ignored), "text", place, ignored)


def as_chat(request: MessagesRequest) -> dict[str, Any]:
    """The fields of a chat that answers `request`. The assistant's words at the end begin its answer."""
    system = [] if not request.system else [{"role": "system", "content": _text(request.system)}]
    turns = [message for turn in request.messages for message in _messages(turn)]
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [*system, *turns],
        "continue_final_message": _is_begun(turns[-1]),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "reasoning_effort": _effort(request),
        **request.carried,
    }
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields | _tools(request)


def _is_begun(last: dict[str, Any]) -> bool:
    return last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"].strip())


def _effort(request: MessagesRequest) -> str | None:
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    return None if request.output_config is None else request.output_config.effort


def _tools(request: MessagesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    functions = [tool for _, tool in request.functions]
    if functions:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in functions
        ]
    choice = request.tool_choice
    # Where all tools were left out, the choice among them is the model's to answer without one.
    if choice is None or (request.tools and not functions and choice.type == "auto"):
        return fields
    if functions:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _result(block: ToolResult) -> str:
    return ("Error: " if block.is_error else "") + _text(block.content or "")


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """A turn as a chat has it: results of calls first, each a message of its own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        for block in turn.content
        if isinstance(block, ToolResult)
    ]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in turn.content
        if isinstance(block, ToolUse)
    ]
    text = "".join(block.text for block in turn.content if isinstance(block, TextBlock))
    thoughts = "\n".join(block.thinking for block in turn.content if isinstance(block, Thinking) and block.thinking)
    told = ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thoughts} if thoughts else {})
    # Templates tell a turn of calls alone by null: DeepSeek-R1's drops the calls beside an empty text.
    said = [{"role": turn.role, "content": text if text or not calls else None} | told]
    return [*results, *(said if text or calls or not results else [])]


def _places(request: MessagesRequest) -> Mapping[str, str]:
    """Of which of the client's turns the chat's messages are made; calls are blocks of a turn's content."""
    places = {f"tools[{number}]": f"tools[{index}]" for number, (index, _) in enumerate(request.functions)}
    places |= {f"{ours}.function": theirs for ours, theirs in places.items()}
    number = 1 if request.system else 0
    for index, turn in enumerate(request.messages):
        for _ in _messages(turn):
            places[f"messages[{number}]"] = f"messages[{index}]"
            places[f"messages[{number}].tool_calls"] = f"messages[{index}].content"
            number += 1
    return places


def client_names(request: MessagesRequest) -> ClientNames:
    """What the client of this request calls the fields of the chat that answers it."""
    is_off = request.thinking is not None and request.thinking.type == "disabled"
    fields = {**_FIELDS, "reasoning_effort": "thinking"} if is_off else _FIELDS
    return ClientNames(fields, partial(_places, request))


_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tools.function.name": "tools.name",
        "tools.function.strict": "tools.strict",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format.schema",
        "response_format.json_schema.schema": "output_config.format.schema",
        "stop": "stop_sequences",
        "messages[system]": "system",
        "tool_choice.function.name": "tool_choice.name",
    }
)
"""Fields of the chat -> what the client calls them."""
