"""The body of OpenAI's `/v1/responses`, checked, and as the fields of a chat that answers it. Pure.

Nothing is stored here: what refers to something stored is refused by name, and `store` itself is ignored.
"""

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from stageline_api.engine_http import MAX_MESSAGES
from stageline_gateway.errors import bad_value
from stageline_gateway.openai_api.chat_types import (
    MAX_ID_CHARACTERS,
    MAX_PARTS,
    MAX_TOOLS,
    ToolName,
)
from stageline_gateway.openai_api.checked_types import OneOf, Strict
from stageline_gateway.openai_api.client_names import ClientNames
from stageline_gateway.openai_api.dialects.responses_tools import (
    AllowedFunctions,
    ChosenFunction,
    Offered,
    ResponseToolChoice,
    ResponseTools,
    joined_name,
    left_out_tools,
    lenient_tool,
    offered_functions,
)
from stageline_gateway.openai_api.known_fields import VLLM_KNOWN, Fate, Known
from stageline_gateway.openai_api.request_types import CarriedToChat, Stop, TokenCount
from stageline_gateway.openai_api.unread_parts import (
    Unread,
    kind_of,
    noted_part,
    read_part,
)
from stageline_gateway.openai_api.validation import IgnoredFields, lenient, with_each

NOTHING_STORED: Final = "Responses are not stored here: send the turns before as 'input'."

RESPONSES_KNOWN: Final[Mapping[str, Known]] = MappingProxyType(
    dict(VLLM_KNOWN)
    | {
        "metadata": Known(Fate.IGNORED, ({},)),
        "store": Known(Fate.IGNORED, (False,)),
        "service_tier": Known(Fate.IGNORED, ("auto", "default")),
        "prompt_cache_retention": Known(Fate.IGNORED),
        "prompt_cache_options": Known(Fate.IGNORED),
        "prompt_cache_key": Known(Fate.IGNORED, ("",)),
        "safety_identifier": Known(Fate.IGNORED, ("",)),
        "stream_options": Known(Fate.IGNORED, ({}, {"include_obfuscation": False})),
        "max_tool_calls": Known(Fate.IGNORED),
        "moderation": Known(Fate.IGNORED),
        "include": Known(Fate.IGNORED, ([],)),
        "truncation": Known(Fate.IGNORED, ("disabled",)),
        "context_management": Known(Fate.IGNORED, ([],)),
        "previous_response_id": Known(Fate.REFUSED, (), NOTHING_STORED),
        "conversation": Known(Fate.REFUSED, (), NOTHING_STORED),
        "prompt": Known(Fate.REFUSED, (), "Prompts are not stored here: send their text as 'input'."),
        "background": Known(Fate.REFUSED, (False,), NOTHING_STORED),
        "top_logprobs": Known(Fate.REFUSED, (0,), "/v1/chat/completions has log probabilities."),
        "image": Known(Fate.REFUSED, ({},), "The models served here read and write text."),
        "access_programs": Known(Fate.REFUSED, ({},)),
        "client_metadata": Known(Fate.IGNORED, ({},)),
        "max_tokens": Known(Fate.REFUSED, (), "Send it as 'max_output_tokens'."),
        "max_completion_tokens": Known(Fate.REFUSED, (), "Send it as 'max_output_tokens'."),
        "response_format": Known(Fate.REFUSED, ({"type": "text"},), "Send it as 'text.format'."),
        "reasoning_effort": Known(Fate.REFUSED, (), "Send it as 'reasoning.effort'."),
    }
)
"""What becomes of fields that are no part of `ResponsesRequest`."""
ITEM_REPEATED: Final = frozenset({"id", "status"})
"""Of an item of `input`: what answers from here have, and clients send back."""
PART_REPEATED: Final = frozenset({"annotations", "logprobs"})
"""Of a part of a message's content, likewise."""
ITEM_IGNORED: Final = frozenset({"phase", "caller", "async", "async_", "parsed_arguments"})
RESULT_IGNORED: Final = ITEM_IGNORED | {"name", "namespace"}
"""Of what a call gave, which its id tells."""
PART_IGNORED: Final = frozenset({"prompt_cache_breakpoint", "parsed"})


class InputText(Strict, frozen=True):
    """A part of a message; only text can be read by the models served here."""

    type: Literal["input_text", "output_text", "text"]
    text: str


InputContent = str | Annotated[list[InputText], Meta(max_length=MAX_PARTS)]


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


_UNREAD: Final = frozenset(
    {
        "additional_tools",
        "compaction",
        "compaction_summary",
        "context_compaction",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "program",
    }
)
_UNREAD_ENDS: Final = ("_call", "_output")
"""Of types of items that tell what OpenAI's own servers did, or what a tool did that can't be offered here."""


class InputItem(OneOf):
    """An item of `input`."""

    kinds = "a message, function_call, function_call_output or reasoning item"

    @classmethod
    def struct_of(cls, value: Any) -> type[Strict | Unread] | None:
        kind = value.get("type", "message") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in _ITEMS:
            return _ITEMS[kind]
        known = kind_of(value)
        return UnreadItem if known is not None and (known in _UNREAD or known.endswith(_UNREAD_ENDS)) else None


class InputMessage(Strict, InputItem, kw_only=True, frozen=True):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent


class InputCall(Strict, InputItem, kw_only=True, frozen=True):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    name: ToolName
    namespace: ToolName | None = None
    arguments: str


class InputCustomCall(Strict, InputItem, kw_only=True, frozen=True):
    """A call of a tool that takes a text in place of arguments."""

    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    name: ToolName
    namespace: ToolName | None = None
    input: str

    @property
    def arguments(self) -> str:
        """The same as a function would be called."""
        return json.dumps({"input": self.input}, ensure_ascii=False)


class InputResult(Strict, InputItem, frozen=True):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    output: InputContent


class InputReasoning(Strict, InputItem, frozen=True):
    """What an earlier answer thought; the model's template decides whether it is shown again."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


class UnreadItem(Unread, InputItem, frozen=True):
    """An item that is left out."""


_ITEMS: Final[Mapping[str, type[Strict]]] = MappingProxyType(
    {
        "message": InputMessage,
        "function_call": InputCall,
        "function_call_output": InputResult,
        "custom_tool_call": InputCustomCall,
        "custom_tool_call_output": InputResult,
        "reasoning": InputReasoning,
    }
)
Input = str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]


class TextFormat(Strict, omit_defaults=True, frozen=True):
    """What the answer's text must be, without the envelope that a chat has around a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = msgspec.field(default=None, name="schema")
    strict: bool | None = None


class TextConfig(Strict, frozen=True):
    """The form of the answer's text. `verbosity` changes nothing."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Strict, frozen=True):
    """How much the model is to think. Nothing is summarized."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesRequest(CarriedToChat, kw_only=True, frozen=True):
    """Body of `POST /v1/responses`."""

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stop: Stop = msgspec.field(default_factory=list)
    stream: bool = False
    tools: ResponseTools = msgspec.field(default_factory=list)
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    user: str | None = None
    """Only repeated in the answer."""

    def __post_init__(self) -> None:
        if (count := len(self.functions)) > MAX_TOOLS:
            raise bad_value("tools", f"has {count} functions, also in namespaces; at most {MAX_TOOLS} are allowed")

    @property
    def functions(self) -> list[Offered]:
        """What the chat offers of the tools."""
        return offered_functions(self.tools)

    @property
    def left_out(self) -> dict[str, str]:
        """Names of tools and items that are left out -> their types."""
        items = self.input if isinstance(self.input, list) else []
        chosen = self.tool_choice.tools if isinstance(self.tool_choice, AllowedFunctions) else []
        return (
            left_out_tools(self.tools)
            | {f"tool_choice.tools[{tool.type}]": tool.type for tool in chosen if isinstance(tool, Unread)}
            | {f"input[{item.type}]": item.type for item in items if isinstance(item, Unread)}
        )


def fields_without_effect(request: ResponsesRequest) -> dict[str, Any]:
    """Names of fields that are understood, and change nothing -> their values."""
    text, reasoning = request.text or TextConfig(), request.reasoning or ReasoningConfig()
    asked_form = text.format
    return {
        **request.left_out,
        "user": request.user or None,
        "text.verbosity": text.verbosity,
        "text.format.description": None if asked_form is None else asked_form.description,
        "reasoning.summary": reasoning.summary,
        "reasoning.generate_summary": reasoning.generate_summary,
        "reasoning.context": reasoning.context,
        "reasoning.mode": reasoning.mode,
    }


def refuse_stored_items(items: Any) -> None:
    """Raise ApiError 400 for an item of `input` that is only a name of something stored; its `type` may be left out."""
    if not isinstance(items, list) or len(items) > MAX_MESSAGES:
        return
    for index, item in enumerate(items):
        if _is_reference(item):
            rule = f"is an item_reference: {NOTHING_STORED.removesuffix('.')}"
            raise bad_value(f"input[{index}]", rule, "unsupported_parameter")


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and item.keys() <= {"id", "type"})


def without_repeated(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` without what `input` repeats of an earlier answer, which asks for nothing."""
    return with_each(fields, "input", MAX_MESSAGES, _item_without_repeated)


def _item_without_repeated(item: Any) -> Any:
    item = _without(ITEM_REPEATED, item)
    for name in ("content", "output"):
        item = with_each(item, name, MAX_PARTS, _read)
    return item


def _read(part: Any) -> Any:
    return read_part(_without(PART_REPEATED, part), "input_text")


def _without(names: AbstractSet[str], part: Any) -> Any:
    if not isinstance(part, dict) or names.isdisjoint(part):
        return part
    return {name: value for name, value in part.items() if name not in names}


def without_hints(fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    """`fields` without what their parts say to nobody here; `ignored` is told of it."""
    fields = with_each(fields, "tools", MAX_TOOLS, lambda tool: lenient_tool(tool, ignored))
    return with_each(fields, "input", MAX_MESSAGES, lambda item: _lenient_item(item, ignored))


def _lenient_item(item: Any, ignored: IgnoredFields) -> Any:
    model = InputItem.struct_of(item)
    if model is None or model is UnreadItem:
        return item
    item = lenient(item, model, RESULT_IGNORED if model is InputResult else ITEM_IGNORED, "input", ignored)
    if model is InputResult and item.get("output", "") is None:
        item = item | {"output": ""}
    item = with_each(item, "content", MAX_PARTS, partial(_lenient_part, "input.content", ignored))
    return with_each(item, "output", MAX_PARTS, partial(_lenient_result_part, "input.output", ignored))


def _lenient_part(place: str, ignored: IgnoredFields, part: Any) -> Any:
    return lenient(part, InputText, PART_IGNORED, place, ignored)


def _lenient_result_part(place: str, ignored: IgnoredFields, part: Any) -> Any:
    return noted_part(_lenient_part(place, ignored, part), "input_text", place, ignored)


def as_chat(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of a chat that answers `request`. Raises ApiError 400 for more calls than a turn may have."""
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [turn.whole_message for turn in _turns(request)],
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop": request.stop,
        "stream": request.stream,
        "max_completion_tokens": request.max_output_tokens,
        "response_format": None if request.text is None else _format(request.text.format),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        **request.carried,
    }
    if request.functions:
        fields["tools"] = [offered.as_chats() for offered in request.functions]
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    choice = request.tool_choice
    match choice:
        case ChosenFunction():
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.chat_name}}
        case AllowedFunctions():
            fields["tool_choice"] = choice.as_chats()
        case _ if choice is not None and (request.functions or choice == "required"):
            fields["tool_choice"] = choice
    return fields


def _format(asked: TextFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type != "json_schema":
        return None if asked is None else {"type": asked.type}
    schema = {"name": asked.name or "answer", "schema": asked.json_schema, "strict": asked.strict}
    return {"type": "json_schema", "json_schema": None if asked.json_schema is None else schema}


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message of the chat, and the items of `input` that it is made of, by their indexes."""

    message: dict[str, Any]
    items: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """Those of its items that are calls."""
    thoughts: list[str] = field(default_factory=list)
    """Texts of reasoning items that belong to it, in order."""

    @property
    def whole_message(self) -> dict[str, Any]:
        """The message with all of its reasoning."""
        return self.message | {"reasoning_content": "\n".join(self.thoughts)} if self.thoughts else self.message


def _turns(request: ResponsesRequest) -> list[_Turn]:
    """The turns; calls go to the assistant's turn before them, as a chat has them."""
    turns: list[_Turn] = []
    if request.instructions:
        turns.append(_Turn({"role": "system", "content": request.instructions}))
    if isinstance(request.input, str):
        return [*turns, _Turn({"role": "user", "content": request.input})]
    thoughts: list[str] = []
    for index, item in enumerate(request.input):
        match item:
            case InputMessage():
                turns.append(_Turn({"role": item.role, "content": _text(item.content)}, [index]))
            case InputCall() | InputCustomCall():
                if not turns or turns[-1].message["role"] != "assistant":
                    turns.append(_Turn({"role": "assistant", "content": None}))
                if len(turns[-1].calls) == MAX_TOOLS:
                    rule = f"is one call more than the {MAX_TOOLS} that a turn may have"
                    raise bad_value(f"input[{index}]", rule)
                turns[-1].message.setdefault("tool_calls", []).append(_call(item))
                turns[-1].items.append(index)
                turns[-1].calls.append(index)
            case InputResult():
                result = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                turns.append(_Turn(result, [index]))
            case InputReasoning():
                thoughts += _thoughts(item)
                continue
            case Unread():
                continue
        if turns[-1].message["role"] == "assistant":
            turns[-1].thoughts.extend(thoughts)
        thoughts = []
    return turns


def _thoughts(item: InputReasoning) -> list[str]:
    """The texts of a reasoning item, or else of its summary."""
    for parts in (item.content, item.summary):
        found = (part.get("text") for part in parts or [] if isinstance(part, dict))
        if texts := [text for text in found if isinstance(text, str) and text]:
            return texts
    return []


def _call(item: InputCall | InputCustomCall) -> dict[str, Any]:
    function = {"name": joined_name(item.namespace, item.name), "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _places(request: ResponsesRequest) -> Mapping[str, str]:
    """Where in `input` the chat's messages and their calls come from."""
    places = {f"tools[{number}]": offered.place for number, offered in enumerate(request.functions)}
    if isinstance(choice := request.tool_choice, AllowedFunctions):
        allowed = enumerate(choice.functions)
        places |= {f"tool_choice.allowed_tools.tools[{n}]": f"tool_choice.tools[{index}]" for n, (index, _) in allowed}
    places |= {f"{ours}.function": theirs for ours, theirs in places.items()}
    for number, turn in enumerate(_turns(request)):
        message = f"messages[{number}]"
        if turn.items:
            places[message] = f"input[{turn.items[0]}]"
        for position, index in enumerate(turn.calls):
            call = f"{message}.tool_calls[{position}]"
            places |= {call: f"input[{index}]", f"{call}.function": f"input[{index}]"}
    return places


def client_names(request: ResponsesRequest) -> ClientNames:
    """What the client of this request calls the fields of the chat that answers it."""
    return ClientNames(_FIELDS, partial(_places, request))


_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tools.function.name": "tools.name",
        "tools.function.strict": "tools.strict",
        "tool_choice.function.name": "tool_choice.name",
        "tool_choice.allowed_tools.tools.function.name": "tool_choice.tools.name",
        "reasoning_effort": "reasoning.effort",
        "messages": "input",
        "messages[system]": "input[system]",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema": "text.format.schema",
        "response_format.json_schema.schema": "text.format.schema",
    }
)
"""Fields of the chat -> what the client calls them."""
