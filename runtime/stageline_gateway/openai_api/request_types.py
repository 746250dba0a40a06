"""The request bodies of OpenAI's API that this gateway understands, checked strictly.

Types are never coerced ("5" is not a number) and an unknown field is refused, so nothing a client asks for is lost
without a word. Extensions to OpenAI's fields: `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, assert_never

from pydantic import Discriminator, Field, Tag

from stageline_api.engine_http import MAX_TOP_LOGPROBS
from stageline_gateway.openai_api.chat_types import (
    MAX_TOOLS,
    Message,
    NamedTool,
    Strict,
    Tool,
    ToolChoice,
    text_or_list,
)

MAX_PARALLEL_CALLS: Final = 16
"""Most calls in one answer: a grammar without a bound lets a small model repeat itself to its token limit."""


def schema_of_calls(tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> str | None:
    """The schema of an answer that must call, as JSON; None when it needn't.

    A named function's answer is its arguments alone. A required call's answer is a list of `{"name", "arguments"}`, the
    form that `tool_calls` reads back.
    """
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
    return {"type": "object"} | (tool.function.parameters or {})


def _call(tool: Tool, place: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": _moved(_parameters(tool), place)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """`schema` with references to its own root (`#`, `#/…`) pointed to `place`, where it now lies."""
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


INT32_MAX = 2**31 - 1
"""Token ids and counts travel as integers of fixed width behind the engine; this bounds them all."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's documented default of `max_tokens` for `/v1/completions`."""

MAX_CHOICES = 128
"""OpenAI's bound on `n`."""

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Field(ge=1, le=INT32_MAX)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
"""A token id as the key of a JSON object."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(min_length=1)]


def _prompt_kind(value: Any) -> str | None:
    match value:
        case str():
            return "#text"
        case [int(), *_]:
            return "#list"
        case _:
            return None


Stop = Annotated[
    Annotated[StopString, Tag("#text")] | Annotated[list[StopString], Tag("#list"), Field(max_length=16)],
    Discriminator(
        text_or_list, custom_error_type="stop_type", custom_error_message="must be a string or a list of strings"
    ),
]
CompletionPrompt = Annotated[
    Annotated[str, Tag("#text")] | Annotated[list[TokenId], Tag("#list")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be one string or one non-empty list of token ids; send several prompts one by one",
    ),
]


class StreamOptions(Strict):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Strict):
    """A schema that the answer satisfies, whether or not `strict` is set; `name` and `description` change nothing."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def schema_text(self) -> str | None:
        """The JSON schema to satisfy, as JSON; None for free text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return '{"type":"object"}'
            case "json_schema":
                return json.dumps(self.json_schema.json_schema if self.json_schema else {})
            case _:
                assert_never(self.type)


class _Request(Strict):
    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] = Field(
        default_factory=dict
    )
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: int | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def schema_text(self) -> str | None:
        return None

    @property
    def limit_name(self) -> str:
        """The field that bounds the answer's length, as the client wrote it."""
        return "max_tokens"

    @property
    def schema_field(self) -> str:
        """The field that `schema_text` was made from."""
        return "response_format"

    @property
    def asked_top_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None for no log probabilities."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(_Request):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def choice_of_tool(self) -> ToolChoice:
        """What was asked for, or OpenAI's default: none without tools, auto with them."""
        return self.tool_choice or ("auto" if self.tools else "none")

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is to see: none of them when it must not call any."""
        return [] if self.choice_of_tool == "none" else self.tools

    @property
    def schema_text(self) -> str | None:
        """The schema of the calls that the answer must make, or of `response_format`."""
        calls = schema_of_calls(self.tools, self.choice_of_tool, self.parallel_tool_calls)
        if calls is not None:
            return calls
        return None if self.response_format is None else self.response_format.schema_text

    @property
    def schema_field(self) -> str:
        return "tools" if self.offered_tools else "response_format"

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def asked_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Request):
    """Body of `POST /v1/completions`."""

    prompt: CompletionPrompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def asked_top_logprobs(self) -> int | None:
        return self.logprobs
