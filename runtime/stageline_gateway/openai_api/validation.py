"""From a JSON object to a checked request, or to the one error that names what is wrong with it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stageline_api.engine_http import MAX_SCHEMA_CHARACTERS
from stageline_gateway.errors import ApiError, bad_value, shown
from stageline_gateway.openai_api.chat_types import UNION_TAGS, NamedTool, check_messages, check_tool_names
from stageline_gateway.openai_api.request_types import ChatRequest, CompletionRequest

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
    """`fields` without the parameters that aren't built here and ask for nothing.

    `best_of: 1` or `tools: []` say what a request without the field says, so clients that always send their defaults
    work. Any other value would be ignored silently, which is worse than a refusal. Null counts as absent.

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


RequestType = TypeVar("RequestType", bound=BaseModel)


def field_path(location: tuple[str | int, ...]) -> str:
    """A path as OpenAI writes it, `messages[0].content`; tags of unions are left out."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in UNION_TAGS:
            path += f".{step}" if path else step
    path = path or str(location[-1])
    return path if len(path) <= 200 else path[:200] + "…"


def _as_api_error(detail: ErrorDetails) -> ApiError:
    param = field_path(detail["loc"])
    rule = detail["msg"].removeprefix("Input ")
    match detail["type"]:
        case "missing":
            return bad_value(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
        case "extra_forbidden":
            return bad_value(param, f"Unrecognized request argument supplied: '{param}'.", "unknown_parameter")
        case kind if kind.endswith(("_type", "union_tag_invalid")):
            return bad_value(
                param, f"Invalid type for '{param}': {rule}; got {shown(detail['input'])}.", "invalid_type"
            )
        case _:
            return bad_value(param, f"Invalid value for '{param}': {rule}; got {shown(detail['input'])}.")


def checked(model: type[RequestType], fields: dict[str, Any]) -> RequestType:
    """`fields` as a `model`; raises ApiError 400 naming the first field that is wrong."""
    # OpenAI's clients may send null for any optional field.
    optional = {name for name, field in model.model_fields.items() if not field.is_required()}
    given = {name: value for name, value in fields.items() if value is not None or name not in optional}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _as_api_error(error.errors(include_url=False, include_context=False)[0]) from None


def _check_stream_options(request: ChatRequest | CompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "'stream_options' is only allowed when 'stream' is true.")


def _check_response_format(request: ChatRequest) -> None:
    wanted = request.response_format
    param = "response_format.json_schema"
    if wanted is None:
        return
    if wanted.type == "json_schema" and wanted.json_schema is None:
        raise bad_value(param, f"'{param}' is required when 'response_format.type' is 'json_schema'.")
    if wanted.type != "json_schema" and wanted.json_schema is not None:
        raise bad_value(param, f"'{param}' is only allowed when 'response_format.type' is 'json_schema'.")


def _check_schema_length(request: ChatRequest) -> None:
    length = len(request.schema_text or "")
    if length > MAX_SCHEMA_CHARACTERS:
        param = "tools" if request.offered_tools else "response_format.json_schema.schema"
        message = f"The schema of '{param}' has {length} characters; at most {MAX_SCHEMA_CHARACTERS} are allowed."
        raise bad_value(param, message)


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


def parse_chat(fields: Mapping[str, Any]) -> ChatRequest:
    request = checked(ChatRequest, without_unsupported(fields, CHAT_NEUTRAL))
    _check_stream_options(request)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad_value("max_tokens", "Set 'max_tokens' or 'max_completion_tokens', not both.")
    check_messages(request.messages)
    _check_response_format(request)
    check_tools(request)
    _check_schema_length(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_value("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return request


def parse_completion(fields: Mapping[str, Any]) -> CompletionRequest:
    request = checked(CompletionRequest, without_unsupported(fields, COMPLETION_NEUTRAL))
    _check_stream_options(request)
    return request
