"""From a JSON object to a checked request, or to the one error that names what is wrong with it."""

import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar, cast

from msgspec import Struct

from stageline_api.engine_http import MAX_MESSAGES, MAX_REGEX_CHARACTERS, MAX_SCHEMA_CHARACTERS
from stageline_gateway.errors import ApiError, bad_value, shown, wrong_value
from stageline_gateway.openai_api.chat_types import (
    MAX_PARTS,
    MAX_TOOLS,
    OWN_TOOLS,
    AllowedTools,
    CalledFunction,
    Function,
    MadeCall,
    Message,
    NamedTool,
    TextPart,
    Tool,
    check_messages,
    check_tool_names,
)
from stageline_gateway.openai_api.checked_types import checked, optional_fields
from stageline_gateway.openai_api.client_names import ClientNames
from stageline_gateway.openai_api.guides import StructuredOutputs
from stageline_gateway.openai_api.known_fields import (
    CALL_IGNORED,
    CALLED_FUNCTION_IGNORED,
    CHAT_KNOWN,
    COMPLETION_KNOWN,
    FUNCTION_IGNORED,
    GUIDE_IGNORED,
    GUIDED,
    MESSAGE_IGNORED,
    PART_IGNORED,
    REASONING,
    STREAM_IGNORED,
    TOOL_IGNORED,
    Fate,
    Known,
)
from stageline_gateway.openai_api.request_types import MAX_CHOICES, ChatRequest, CompletionRequest
from stageline_gateway.openai_api.unread_parts import Unread, is_server_tool, kind_of, noted_part, read_part
from stageline_gateway.strict_json import parse_json

IgnoredFields = dict[str, None]
"""Names of what was left out, in the order in which they were met; names of our own tables, never a client's words."""


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # Types are compared too: Python's True == 1 would let `n: true` pass.
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


def settled(
    fields: Mapping[str, Any], known: Mapping[str, Known], strict: bool, ignored: IgnoredFields
) -> dict[str, Any]:
    """`fields` without those of `known`: what asks for nothing is left out, what may be ignored goes to `ignored`.

    Raises ApiError 400, naming the parameter, for one that asks for something this server can't do; where it is
    `strict`, also for one that could be ignored.
    """
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        rule = known.get(name)
        if rule is None:
            kept[name] = value
        elif _is_neutral(value, rule.neutral):
            continue
        elif rule.fate is Fate.IGNORED and not strict:
            ignored[name] = None
        else:
            raise _unsupported(name, value, rule)
    return kept


def _unsupported(name: str, value: Any, rule: Known) -> ApiError:
    instead = f"leave it out or send {shown(rule.neutral[0])}" if rule.neutral else "leave it out"
    why = f". {rule.why}".removesuffix(".") if rule.why else ""
    said = f"= {shown(value)} is not supported by this server: {instead}{why}"
    return bad_value(name, said, "unsupported_parameter")


def lenient(part: Any, model: type[Struct], names: AbstractSet[str], place: str, ignored: IgnoredFields) -> Any:
    """`part`, which is to become a `model`, without the fields of `names`; `ignored` is told of them as fields of
    `place`. Null asks for nothing: a field that has it is left out, known or not, unless the `model` requires it.
    """
    if not isinstance(part, dict) or (names.isdisjoint(part) and None not in part.values()):
        return part
    required, kept = {*model.__struct_encode_fields__} - optional_fields(model).keys(), dict[str, Any]()
    for name, value in part.items():
        if value is not None and name in names:
            ignored[f"{place}.{name}"] = None
        elif value is not None or name in required:
            kept[name] = value
    return kept


Part = TypeVar("Part")


def with_each(part: Part, name: str, most: int, mended: Callable[[Any], Any]) -> Part:
    """`part` with each entry of its list `name` as `mended` makes it; what has another form, or more entries than
    `most`, is left for its own error."""
    entries = part.get(name) if isinstance(part, dict) else None
    if not isinstance(entries, list) or len(entries) > most:
        return part
    return cast("Part", {**cast("dict[str, Any]", part), name: [mended(entry) for entry in entries]})


def without_effect(fields: Mapping[str, Any], strict: bool, ignored: IgnoredFields) -> None:
    """Name in `ignored` those of `fields` that aren't null; raises ApiError 400 for one where it is `strict`."""
    for name, value in fields.items():
        if value is not None:
            if strict:
                raise _unsupported(name, value, Known(Fate.IGNORED))
            ignored[name] = None


def _lenient_message(message: Any, ignored: IgnoredFields) -> Any:
    if not isinstance(message, dict):
        return message
    names = MESSAGE_IGNORED - {"name"} if message.get("role") == "tool" else MESSAGE_IGNORED
    is_assistant = message.get("role") == "assistant"
    names |= {name for name in REASONING if not (is_assistant and isinstance(message.get(name), str))}
    message = lenient(message, Message, names, "messages", ignored)
    lenient_part = _lenient_result_part if message.get("role") == "tool" else _lenient_part
    message = with_each(message, "content", MAX_PARTS, lambda part: lenient_part(part, ignored))
    return with_each(message, "tool_calls", MAX_TOOLS, lambda call: _lenient_call(call, ignored))


def _lenient_part(part: Any, ignored: IgnoredFields) -> Any:
    return lenient(part, TextPart, PART_IGNORED, "messages.content", ignored)


def _lenient_result_part(part: Any, ignored: IgnoredFields) -> Any:
    return noted_part(_lenient_part(part, ignored), "text", "messages.content", ignored)


def _text_read(message: Any) -> Any:
    """A message with text that stands in parts of other types as parts of text, and calls of custom tools as calls."""
    message = with_each(message, "content", MAX_PARTS, lambda part: read_part(part, "text"))
    return with_each(message, "tool_calls", MAX_TOOLS, _custom_call_read)


def _custom_call_read(call: Any) -> Any:
    """A call that has a text in place of arguments, as the same function would be called."""
    match call:
        case {"type": "custom", "custom": {"name": name, "input": str(text)}}:
            rest = {key: value for key, value in call.items() if key != "custom"}
            arguments = json.dumps({"input": text}, ensure_ascii=False)
            return rest | {"type": "function", "function": {"name": name, "arguments": arguments}}
        case _:
            return call


def _callable_tools(fields: dict[str, Any], ignored: IgnoredFields) -> tuple[dict[str, Any], Mapping[str, str]]:
    """`fields` without tools that can't be called, which `ignored` names, and the client's indexes of the others."""
    tools = fields.get("tools")
    if (
        not isinstance(tools, list)
        or len(tools) > MAX_TOOLS
        or not any(is_server_tool(one, OWN_TOOLS) for one in tools)
    ):
        return fields, {}
    kept = [index for index, tool in enumerate(tools) if not is_server_tool(tool, OWN_TOOLS)]
    ignored |= {f"tools[{kind_of(tool)}]": None for tool in tools if is_server_tool(tool, OWN_TOOLS)}
    fields = fields | {"tools": [tools[index] for index in kept]}
    if not kept and fields.get("tool_choice") == "auto":
        del fields["tool_choice"]
    places = {f"tools[{number}]": f"tools[{index}]" for number, index in enumerate(kept)}
    return fields, places | {f"{ours}.function": f"{theirs}.function" for ours, theirs in places.items()}


def _lenient_call(call: Any, ignored: IgnoredFields) -> Any:
    place = "messages.tool_calls"
    call = lenient(call, MadeCall, CALL_IGNORED, place, ignored)
    return _with_function(call, CalledFunction, CALLED_FUNCTION_IGNORED, place, ignored)


def _lenient_tool(tool: Any, ignored: IgnoredFields) -> Any:
    tool = lenient(tool, Tool, TOOL_IGNORED, "tools", ignored)
    return _with_function(tool, Function, FUNCTION_IGNORED, "tools", ignored)


def _with_function(part: Any, model: type[Struct], names: AbstractSet[str], place: str, ignored: IgnoredFields) -> Any:
    function = part.get("function") if isinstance(part, dict) else None
    made = lenient(function, model, names, f"{place}.function", ignored)
    return part if made is function else part | {"function": made}


def _lenient_parts(fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    """`fields` without what may be ignored in messages, tools and options; what has another form is left for its own
    error."""
    fields = with_each(fields, "messages", MAX_MESSAGES, lambda message: _lenient_message(message, ignored))
    fields = with_each(fields, "tools", MAX_TOOLS, lambda tool: _lenient_tool(tool, ignored))
    options = fields.get("stream_options")
    if isinstance(options, dict) and not STREAM_IGNORED.isdisjoint(options):
        asked = {name for name in STREAM_IGNORED if options.get(name)}
        ignored |= {f"stream_options.{name}": None for name in sorted(asked)}
        return fields | {
            "stream_options": {name: value for name, value in options.items() if name not in STREAM_IGNORED}
        }
    return fields


def _check_stream(request: ChatRequest | CompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "is only allowed when 'stream' is true")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise bad_value(param, "= true is not supported by this server", "unsupported_parameter")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_value("prompt_logprobs", f"= {request.prompt_logprobs} is only allowed when 'stream' is false")


def _check_response_format(request: ChatRequest) -> None:
    wanted = request.response_format
    param = "response_format.json_schema"
    if wanted is None:
        return
    if wanted.type == "json_schema" and wanted.json_schema is None:
        raise bad_value(param, "is missing, of a format of type 'json_schema'")
    if wanted.type != "json_schema" and wanted.json_schema is not None:
        raise bad_value(param, "is only allowed in a format of type 'json_schema'")


def with_guide(fields: dict[str, Any], strict: bool, ignored: IgnoredFields) -> dict[str, Any]:
    """`fields` with vLLM's older names of guides as `structured_outputs`; raises ApiError 400 for several."""
    old = [name for name in GUIDED if fields.get(name) is not None]
    guide = fields.get("structured_outputs")
    if not strict:
        guide = lenient(guide, StructuredOutputs, GUIDE_IGNORED, "structured_outputs", ignored)
        fields["structured_outputs"] = guide
    if len(old) + (guide is not None) > 1:
        raise bad_value(old[-1], "can't be combined with another guide of the answer")
    rest = {name: value for name, value in fields.items() if name not in GUIDED}
    return rest | {"structured_outputs": {GUIDED[old[0]]: fields[old[0]]}} if old else rest


def _check_guide(request: ChatRequest | CompletionRequest) -> None:
    """Raise ApiError 400 for guides that contradict each other, or are too long."""
    guide = request.structured_outputs
    if guide is not None:
        named = guide.named
        if len(named) != 1:
            rule = "should have exactly one of json, json_object, regex, choice, grammar"
            raise wrong_value("structured_outputs", rule, named)
        if guide.json_object is False:
            param = "structured_outputs.json_object"
            raise wrong_value(param, "should be true", False)
        if isinstance(request, ChatRequest):
            _check_alone(request)
        if guide.is_too_long:
            rule = f"makes an expression of more than {MAX_REGEX_CHARACTERS} characters"
            raise bad_value(f"structured_outputs.{named[0]}", rule)
    _check_schema_length(request)
    if guide is not None and isinstance(guide.json_schema, str):
        _check_schema_text(guide.json_schema)


def _check_schema_text(text: str) -> None:
    """Raise ApiError 400 for a schema given as text that is none."""
    try:
        is_schema = isinstance(parse_json(text), dict | bool)
    except ValueError:
        is_schema = False
    if not is_schema:
        rule = "(or 'guided_json') as text should be a JSON object or boolean"
        raise wrong_value("structured_outputs.json", rule, text)


def _check_alone(request: ChatRequest) -> None:
    others = {
        "tools": bool(request.offered_tools),
        "response_format": request.response_format is not None and request.response_format.type != "text",
    }
    for name in (name for name, is_there in others.items() if is_there):
        raise bad_value("structured_outputs", "can't be combined with", other=name)


def _check_schema_length(request: ChatRequest | CompletionRequest) -> None:
    length = len(request.schema_text or "")
    if length > MAX_SCHEMA_CHARACTERS:
        field = request.schema_field
        param = {
            "response_format": "response_format.json_schema.schema",
            "structured_outputs": "structured_outputs.json",
        }.get(field, field)
        rule = f"makes a schema of {length} characters; at most {MAX_SCHEMA_CHARACTERS} are allowed"
        raise bad_value(param, rule)


def check_tools(request: ChatRequest, ignored: IgnoredFields, strict: bool = False) -> None:
    """Raise ApiError 400 for tools that can't be told apart, chosen or combined as asked."""
    names = check_tool_names(request.tools)
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        _check_allowed(choice, names, ignored, strict)
    # A choice of allowed tools by the model itself may leave it none.
    has_to_offer = (
        request.choice_of_tool != "auto" if isinstance(choice, AllowedTools) else choice not in (None, "none")
    )
    if has_to_offer and not request.offered_tools:
        raise bad_value("tool_choice", "is only allowed with 'tools' of which one can be called here")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad_value("tool_choice.function.name", f"= {shown(choice.function.name)} is none of the tools")
    if request.offered_tools:
        _check_offered(request, ignored, strict)


def _check_allowed(choice: AllowedTools, names: list[str], ignored: IgnoredFields, strict: bool) -> None:
    for index, tool in enumerate(choice.allowed_tools.tools):
        param = f"tool_choice.allowed_tools.tools[{index}].function.name"
        if isinstance(tool, NamedTool) and tool.function.name not in names:
            raise bad_value(param, f"= {shown(tool.function.name)} is none of the tools")
        if isinstance(tool, Unread):
            without_effect({f"tool_choice.allowed_tools.tools[{tool.type}]": tool.type}, strict, ignored)


def _check_offered(request: ChatRequest, ignored: IgnoredFields, strict: bool) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        raise bad_value(
            "response_format", "can't be combined with tools, unless calls are forbidden by", other="tool_choice"
        )
    if request.choice_of_tool == "auto":
        _check_auto(request, strict, ignored)


def _check_auto(request: ChatRequest, strict: bool, ignored: IgnoredFields) -> None:
    """Where the model decides, nothing holds it to schemas, or to one call."""
    offered = {tool.function.name for tool in request.offered_tools}
    tools = enumerate(tool.function for tool in request.tools)
    is_held = [index for index, function in tools if function.strict and function.name in offered]
    if not request.parallel_tool_calls:
        ignored["parallel_tool_calls"] = None
        if strict:
            rule = "can only forbid further calls where one is required by"
            raise bad_value("parallel_tool_calls", rule, "unsupported_parameter", "tool_choice")
    if is_held:
        ignored["tools.function.strict"] = None
        if strict:
            param = f"tools[{is_held[0]}].function.strict"
            rule = "= true is only supported where a call is required by"
            raise bad_value(param, rule, "unsupported_parameter", "tool_choice")


def parse_chat(fields: Mapping[str, Any], ignored: IgnoredFields, strict: bool = False) -> ChatRequest:
    """The checked request; what was left out of it is named in `ignored`."""
    kept = with_each(settled(fields, CHAT_KNOWN, strict, ignored), "messages", MAX_MESSAGES, _text_read)
    if strict:
        return _checked_chat(kept, ignored, strict)
    kept, places = _callable_tools(kept, ignored)
    try:
        return _checked_chat(_lenient_parts(kept, ignored), ignored, strict)
    except ApiError as error:
        raise error.renamed(ClientNames(places=lambda: places).of) from None


def _checked_chat(kept: dict[str, Any], ignored: IgnoredFields, strict: bool) -> ChatRequest:
    request = checked(ChatRequest, with_guide(kept, strict, ignored))
    _check_stream(request)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad_value("max_tokens", "can't be combined with", other="max_completion_tokens")
    check_messages(request.messages)
    _check_response_format(request)
    wanted = request.response_format
    if wanted is not None and wanted.json_schema is not None:
        param = "response_format.json_schema.description"
        without_effect({param: wanted.json_schema.description}, strict, ignored)
    check_tools(request, ignored, strict)
    _check_guide(request)
    if request.continue_final_message and "add_generation_prompt" in kept and request.add_generation_prompt:
        raise bad_value("continue_final_message", "can't be combined with", other="add_generation_prompt")
    if request.continue_final_message and not request.messages[-1].text.strip():
        raise bad_value("continue_final_message", "needs words in the last message")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_value("top_logprobs", "is only allowed when 'logprobs' is true")
    return request


def parse_completion(fields: Mapping[str, Any], ignored: IgnoredFields, strict: bool = False) -> CompletionRequest:
    """The checked request; what was left out of it is named in `ignored`."""
    kept = settled(fields, COMPLETION_KNOWN, strict, ignored)
    if not strict:
        kept = _lenient_parts(kept, ignored)
    request = checked(CompletionRequest, with_guide(kept, strict, ignored))
    _check_stream(request)
    _check_guide(request)
    if request.num_choices > MAX_CHOICES:
        rule = f"has {request.num_prompts} prompts and 'n' is {request.n}: more than {MAX_CHOICES} answers"
        raise bad_value("prompt", rule)
    if request.max_tokens == 0 and not request.echo:
        rule = "= 0 is only allowed with 'echo' = true: otherwise there is nothing to answer"
        raise bad_value("max_tokens", rule)
    return request
