"""The request bodies of OpenAI's API that this gateway understands, checked strictly.

Types are never coerced ("5" is not a number) and an unknown field is refused, so nothing a client asks for is lost
without a word. Extensions to OpenAI's fields: `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`,
`min_tokens`, `allowed_token_ids`, `bad_words`, `prompt_logprobs`, `cache_salt`.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, assert_never, cast

from msgspec import Meta, field

from stageline_api.engine_http import (
    MAX_ALLOWED_TOKENS,
    MAX_ARGUMENT_CHARACTERS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_TEMPLATE_ARGUMENTS,
    MAX_TOP_LOGPROBS,
)
from stageline_gateway.errors import bad_value, wrong_value
from stageline_gateway.openai_api.chat_types import (
    AllowedTools,
    ChosenTool,
    Messages,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
)
from stageline_gateway.openai_api.checked_types import Strict, optional_fields
from stageline_gateway.openai_api.guides import ResponseFormat, StructuredOutputs
from stageline_gateway.openai_api.schemas import moved_schema
from stageline_gateway.openai_api.thoughts import OPENING

MAX_PARALLEL_CALLS: Final = 16
"""Most calls in one answer: a grammar without a bound lets a small model repeat itself to its token limit."""


def schema_of_calls(tools: Sequence[Tool], choice: ChosenTool, parallel: bool) -> str | None:
    """The schema of an answer that must call, as JSON; None when it needn't.

    A named function's answer is its arguments alone. A required call's answer is a list of `{"name", "arguments"}`, the
    form that `streamed_calls` reads back.
    """
    match choice:
        case "none" | "auto":
            return None
        case "required":
            schemas = _without_repeated_ids([_parameters(tool) for tool in tools])
            calls = [
                _call(tool, parameters, f"#/items/anyOf/{index}/properties/arguments")
                for index, (tool, parameters) in enumerate(zip(tools, schemas, strict=True))
            ]
            most = MAX_PARALLEL_CALLS if parallel else 1
            return json.dumps({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}})
        case NamedTool(function=named):
            chosen = next(tool for tool in tools if tool.function.name == named.name)
            return json.dumps(_parameters(chosen))
        case _:
            assert_never(choice)


def _parameters(tool: Tool) -> dict[str, Any]:
    """Arguments are always an object, also where the tool forgets to say so, or admits more."""
    return (tool.function.parameters or {}) | {"type": "object"}


def _call(tool: Tool, parameters: dict[str, Any], place: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": moved_schema(parameters, place)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _without_repeated_ids(parameters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Schemas that lie in one document now: by an `$id` of two of them, only one would be found."""
    seen: set[str] = set()
    for each in parameters:
        own = each.get("$id")
        if isinstance(own, str) and own in seen:
            each = {key: value for key, value in each.items() if key != "$id"}
        elif isinstance(own, str):
            seen.add(own)
        yield each


INT32_MAX = 2**31 - 1
"""Token ids and counts travel as integers of fixed width behind the engine; this bounds them all."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's documented default of `max_tokens` for `/v1/completions`."""

MAX_CHOICES = 128
"""OpenAI's bound on `n`; here also on the answers to all prompts of a request together."""

MAX_BIASES = 1024

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenKey = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,9})$(?!\n)")]
"""A token id as the key of a JSON object."""
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[dict[TokenKey, Bias], Meta(max_length=MAX_BIASES)]
TemplateArgument = Annotated[str, Meta(max_length=MAX_ARGUMENT_CHARACTERS)] | bool | int | float | None
ArgumentName = Annotated[str, Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$(?!\n)")]
TemplateArguments = Annotated[dict[ArgumentName, TemplateArgument], Meta(max_length=MAX_TEMPLATE_ARGUMENTS)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=16)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
_ID_SCHEMA: Final = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
_PROMPTS_SCHEMA: Final = {
    "items": {},
    "anyOf": [
        {"items": _ID_SCHEMA},
        {"maxItems": MAX_CHOICES, "items": {"type": "string"}},
        {"maxItems": MAX_CHOICES, "items": {"type": "array", "minItems": 1, "items": _ID_SCHEMA}},
    ],
}
CompletionPrompt = (
    str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, extra_json_schema=_PROMPTS_SCHEMA)]
)


def _check_prompts(prompts: Sequence[str | int | list[int]]) -> None:
    """Token ids are one prompt; else each entry is one, of the kind that the first is."""
    kind = type(prompts[0])
    if set(map(type, prompts)) != {kind}:
        index = next(index for index, one in enumerate(prompts) if type(one) is not kind)
        rule = "should be of the type of 'prompt[0]'"
        raise wrong_value(f"prompt[{index}]", rule, prompts[index], "invalid_type")
    if kind is not int and len(prompts) > MAX_CHOICES:
        raise bad_value("prompt", f"should have at most {MAX_CHOICES} prompts; it has {len(prompts)}")


class StreamOptions(Strict, frozen=True):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None


class CarriedFields(Strict, frozen=True):
    """What is beyond the fields of the API that a body is of, and has the same name and effect in all of them.

    None of a field that may be None is the model's own.
    """

    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """0, or vLLM's -1, is all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: LogitBias = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] = field(
        default_factory=list
    )
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] = field(default_factory=list)
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None


class _Request(CarriedFields, kw_only=True, frozen=True):
    model: str
    max_tokens: TokenCount | None = None
    # None of these two, and of `max_tokens`, is the model's own.
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop = field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_choices(self) -> int:
        """Answers asked for, to all prompts together; the first `n` of them are to the first prompt."""
        return self.n * self.num_prompts

    @property
    def num_echoes(self) -> int:
        """Answers that begin with their prompt's text."""
        return 0

    @property
    def asked_prompt_logprobs(self) -> int | None:
        """How many alternatives to ask for with each token of the prompt; None for no log probabilities of these."""
        return self.prompt_logprobs

    @property
    def wants_prompt(self) -> bool:
        """Whether the answer has the prompt's tokens."""
        return self.asked_prompt_logprobs is not None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def schema_text(self) -> str | None:
        """The JSON schema that the answer's text satisfies, as JSON."""
        return None if self.structured_outputs is None else self.structured_outputs.schema_text

    @property
    def regex_text(self) -> str | None:
        """The expression that the answer's text matches."""
        return None if self.structured_outputs is None else self.structured_outputs.regex_text

    @property
    def grammar_text(self) -> str | None:
        """The grammar that the answer's text follows."""
        return None if self.structured_outputs is None else self.structured_outputs.grammar

    @property
    def limit_name(self) -> str:
        """The field that bounds the answer's length, as the client wrote it."""
        return "max_tokens"

    @property
    def schema_field(self) -> str:
        """The field that `schema_text` or `regex_text` was made from."""
        return "structured_outputs"

    @property
    def asked_top_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None for no log probabilities."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CarriedToChat(CarriedFields, frozen=True):
    """The same, of an API whose bodies become chats; `priority` and the like are known there and change nothing."""

    chat_template_kwargs: TemplateArguments = field(default_factory=dict)

    @property
    def carried(self) -> dict[str, Any]:
        """These fields of the body, as a chat has them."""
        usual = optional_fields(CarriedToChat)
        return {name: value for name in usual if (value := getattr(self, name)) != usual[name]}


class ChatRequest(_Request, kw_only=True, frozen=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    response_format: ResponseFormat | None = None
    tools: Tools = field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def choice_of_tool(self) -> ChosenTool:
        """What was asked for, or OpenAI's default: none without tools, auto with them."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or ("auto" if self.tools else "none")

    @property
    def goes_on(self) -> bool:
        """Whether the answer goes on with words of the last message, behind a mark of thoughts if it has one."""
        return self.continue_final_message and not self.messages[-1].text.rstrip().endswith(OPENING)

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is to see: those that it may call."""
        if isinstance(self.tool_choice, AllowedTools):
            names = self.tool_choice.allowed_tools.names
            return [tool for tool in self.tools if tool.function.name in names]
        return [] if self.choice_of_tool == "none" else self.tools

    @property
    def schema_text(self) -> str | None:
        """The schema of the calls that the answer must make, or of `response_format`."""
        calls = schema_of_calls(self.offered_tools, self.choice_of_tool, self.parallel_tool_calls)
        if calls is not None:
            return calls
        return super().schema_text if self.response_format is None else self.response_format.schema_text

    @property
    def schema_field(self) -> str:
        if self.offered_tools:
            return "tools"
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def asked_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Request, kw_only=True, frozen=True):
    """Body of `POST /v1/completions`."""

    prompt: CompletionPrompt
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prompt, list):
            _check_prompts(self.prompt)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        match self.prompt:
            case str() | [int(), *_]:
                return [cast("str | list[int]", self.prompt)]
            case _:
                return cast("list[str] | list[list[int]]", self.prompt)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_echoes(self) -> int:
        return self.num_choices if self.echo else 0

    @property
    def asked_prompt_logprobs(self) -> int | None:
        """The more of what is asked for itself and of what an echo has beside its answer's."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    @property
    def wants_prompt(self) -> bool:
        """Also where it is echoed and the client gave no text of it."""
        echoes_ids = self.echo and not all(isinstance(prompt, str) for prompt in self.prompts)
        return echoes_ids or self.asked_prompt_logprobs is not None

    @property
    def asked_top_logprobs(self) -> int | None:
        return self.logprobs
