"""The engine's HTTP interface towards the gateway: request, events, errors.

`POST /v1/generate` takes a `GenerateRequest` and answers with newline-delimited JSON, one `Event` per line: exactly
one `Admitted`, any number of `PromptTokens`, any number of `Delta`, then exactly one `Finished` or `Failed`. A blank
line, every few seconds, says that the request still waits, for its turn while the group works or for what it needs
before; readers skip it. A request that is refused before it is admitted gets a 4xx or 503 with an `EngineError` body;
where blank lines came first, with 200, the refusal is its only other line, as among many (`multiplexing.Refused`).
Closing the connection aborts the request. `POST /v1/multiplexed` does this for many requests over one connection.
All but the probes ask for a key (`engine_access`).
`POST /v1/tokenize` and `POST /v1/detokenize` turn a prompt into ids and ids into text, as a request's would be.
`POST /v1/drain` stops admission and lets streams finish. `GET /status` is `health.EngineStatus`.
`GET /v1/prefixes` says which beginnings of prompts the prefix cache holds, by the names that requests gave them.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolCall(_Frozen):
    """A call of a tool in an earlier turn of the assistant."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    """An object; a text where what the model wrote is none, as the token limit cut it off, or it was wrong."""


class ChatMessage(_Frozen):
    """One turn of a chat; rendered by the model's own chat template."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = Field(default=(), fail_fast=True)
    tool_call_id: str | None = None
    """In a turn of role `tool`: the call that this is the result of."""
    name: str | None = None


class ToolFunction(_Frozen):
    """A function that the model may ask to be called; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}


class ToolCallFormat(StrEnum):
    """How a model writes the calls it makes, after its chat template."""

    TAGGED = "tagged"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call, text before it allowed."""
    OBJECT = "object"
    """The whole answer is `{"name": …, "parameters": {…}}`."""
    ARRAY = "array"
    """The whole answer is `[{"name": …, "arguments": {…}}, …]`."""


class ThoughtStart(StrEnum):
    """Where an answer's thoughts begin, which end with `</think>`."""

    TAGGED = "tagged"
    """After a `<think>` at the answer's beginning, if there is one."""
    OPEN = "open"
    """At once: the prompt ended within a thought."""


MAX_TEMPLATE_ARGUMENTS = 16
MAX_ARGUMENT_CHARACTERS = 1024
TemplateArgument = Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)] | bool | int | float | None
MAX_MESSAGES = 8192
"""Of one chat: a template runs over each of them."""


class ChatPrompt(_Frozen):
    """Messages to render with the chat template, generation prompt added unless said otherwise."""

    kind: Literal["chat"] = "chat"
    messages: tuple[ChatMessage, ...] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: tuple[ToolFunction, ...] = Field(default=(), fail_fast=True)
    """Shown to the model by its template."""
    tools_guided: bool = False
    """The answer is held to a schema of calls, so it needs no format of the model's own, nor a template with tools."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends with the last message's words, which the answer continues."""
    template_arguments: dict[str, TemplateArgument] = Field(default={}, max_length=MAX_TEMPLATE_ARGUMENTS)
    """More variables for the template."""
    reasoning_effort: str | None = Field(default=None, max_length=32)
    """How much to think, where the template takes that; `none` is not at all."""


class TextPrompt(_Frozen):
    """Raw text, tokenized as it is."""

    kind: Literal["text"] = "text"
    text: str


class TokenPrompt(_Frozen):
    """Token ids, used as they are."""

    kind: Literal["tokens"] = "tokens"
    token_ids: tuple[int, ...] = Field(min_length=1, fail_fast=True)


Prompt = Annotated[ChatPrompt | TextPrompt | TokenPrompt, Field(discriminator="kind")]


MAX_TOP_LOGPROBS = 20
MAX_STOP_CHARACTERS = 256
"""Of one stop string: each character of an answer is compared with it, and text is held back for as long as it."""
MAX_SCHEMA_CHARACTERS = 65536
MAX_REGEX_CHARACTERS = 32768
MAX_GRAMMAR_CHARACTERS = 32768
REGEX_MARK = "regex:"
"""Begins a guide that is a regular expression; one without a mark is a JSON schema, as no JSON text begins with one."""
GRAMMAR_MARK = "grammar:"
"""Begins a guide that is a grammar."""
MAX_SALT_CHARACTERS = 256
MAX_ALLOWED_TOKENS = 16384
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 128


class SamplingParams(_Frozen):
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing.

    None is what the model's `generation_config.json` says where it is followed, else a temperature of 1 and all others
    off. It is never written: an engine that does not know of it takes a field that is missing for the same.
    """

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    """Tokens less likely than this times the likeliest are left out."""
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100.0)
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's logit for each time it was generated."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's logit once it was generated."""
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default={}, max_length=1024)
    """Token id -> added to its logit."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Drawn by the gateway when the client gives none; noise is keyed by (seed, choice, position)."""
    choice: int = Field(default=0, ge=0, lt=2**31)
    """Which of several answers to one prompt this is."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """How many of the likeliest tokens to report with each token; None reports no log probabilities."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """How many of the likeliest tokens to tell with each of the prompt's; None tells no log probabilities of these.
    With them the prompt is computed whole, whatever the cache holds."""
    prompt_told: int | None = Field(default=None, ge=0)
    """The prompt's tokens are told (`PromptTokens`), but for so many that an engine before this one has told; None:
    they aren't."""
    lists_stop_token: bool | None = None
    """Whether log probabilities are reported of a stop token too, though it doesn't show in the text: then the last
    ones reported are those of the last token, as who adds up a text's expects it."""
    prompt_only: bool | None = None
    """Whether no output is wanted, only what is told of the prompt; `max_tokens` is 1 then."""
    max_tokens: int | None = Field(default=None, ge=1)
    """None allows as many as the context still holds."""
    json_schema: str | None = Field(default=None, max_length=MAX_SCHEMA_CHARACTERS)
    """A JSON schema, written as JSON, that the answer's text satisfies; refusals name it `response_format`."""
    regex: str | None = Field(default=None, min_length=1, max_length=MAX_REGEX_CHARACTERS)
    """A regular expression that the whole of the answer's text matches."""
    grammar: str | None = Field(default=None, min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)
    """A context-free grammar, as Lark or GBNF writes it, that the whole of the answer's text follows. An answer has one
    of `json_schema`, `regex` and `grammar` at most."""
    min_tokens: int = Field(default=0, ge=0)
    """Before so many tokens are generated, neither a stop token nor a stop string ends the answer."""
    allowed_token_ids: tuple[int, ...] = Field(default=(), max_length=MAX_ALLOWED_TOKENS, fail_fast=True)
    """All that may be generated; empty: everything."""
    bad_words: tuple[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)], ...] = Field(
        default=(), max_length=MAX_BAD_WORDS, fail_fast=True
    )
    """Texts that, as the tokenizer writes them at a beginning or after a blank, are never generated."""
    stop: tuple[str, ...] = Field(default=(), max_length=16, fail_fast=True)
    stop_token_ids: tuple[int, ...] = Field(default=(), max_length=64, fail_fast=True)
    ignore_eos: bool = False

    @field_validator("json_schema")
    @classmethod
    def _is_no_expression(cls, value: str | None) -> str | None:
        # Both go their way as one text, and expressions have a bound of their own.
        for mark in (REGEX_MARK, GRAMMAR_MARK):
            if value is not None and value.startswith(mark):
                raise ValueError(f"a JSON schema can't begin with {mark!r}")
        return value

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}

    @property
    def has_exclusions(self) -> bool:
        """Whether tokens are kept out of the answer by name."""
        return self.min_tokens > 0 or bool(self.allowed_token_ids) or bool(self.bad_words)

    @property
    def guide(self) -> str | None:
        """What the answer is held to, as one text: a JSON schema, or what comes after one of the marks."""
        if self.regex is not None:
            return REGEX_MARK + self.regex
        return self.json_schema if self.grammar is None else GRAMMAR_MARK + self.grammar


MAX_PREFIXES = 64
PrefixKey = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
"""Names the beginning of a prompt by its content; the gateway chooses how, and the engine only repeats it."""
PromptPrefix = tuple[PrefixKey, Annotated[float, Field(gt=0.0, le=1.0)]]
"""A beginning and which share of the prompt it is."""

LOWEST_PRIORITY = 1000
HIGHEST_PRIORITY = -1000


class GenerateRequest(_Frozen):
    """One completion to generate, from its beginning or from where another engine left it.

    To continue, `generated_token_ids` holds the ids of all `Delta`s relayed so far, and `prompt`, `sampling` and `seed`
    are those of the first time. Limits, stop conditions, penalties, grammar and usage count these ids as output;
    `Delta`s carry what comes after them and `Finished.completion_tokens` counts them too. When they end the output
    already, `Finished` follows `Admitted` at once.
    """

    request_id: str = Field(min_length=1, max_length=128)
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    generated_token_ids: tuple[int, ...] = Field(default=(), fail_fast=True)
    """Tokens of this choice generated before, in order, no more than `sampling.max_tokens`."""
    generated_characters: int | None = Field(default=None, ge=0)
    """Characters (code points) of all text relayed before; the new text continues there. Best always given: None stands
    for the text released with these ids, and the `Delta`s relayed may end with more, which the end set free."""
    adapter: str | None = Field(default=None, min_length=1, max_length=128)
    """The LoRA adapter that answers in place of the model itself."""
    priority: int = Field(default=0, ge=HIGHEST_PRIORITY, le=LOWEST_PRIORITY)
    """Lower runs first; among equals, who came first."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARACTERS)
    """Only requests with the same one share what the prefix cache holds; those without share among themselves."""
    prefixes: tuple[PromptPrefix, ...] = Field(default=(), max_length=MAX_PREFIXES, fail_fast=True)
    """Beginnings of the prompt, the shortest first, to be told as held for as long as the cache holds them. Only for an
    engine whose status `tells_prefixes`."""
    client_request_id: str | None = Field(default=None, max_length=128)
    """What the client calls it (`X-Request-Id`); not unique."""
    traceparent: str | None = Field(default=None, max_length=55)
    """W3C trace context of the request, for logs and spans; it changes nothing else."""
    tracestate: str | None = Field(default=None, max_length=512)
    """What tracing systems add to it, as it came."""


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Admitted(_Frozen):
    """The request holds a place; prompt tokenized."""

    type: Literal["admitted"] = "admitted"
    prompt_tokens: int
    tool_call_format: ToolCallFormat | None = None
    """How calls are written in this answer; None when it was given no tools, or is held to a schema."""
    thoughts: ThoughtStart | None = None
    """How this answer may begin with thoughts, after the model's chat template; None when it doesn't."""
    ignored: tuple[str, ...] = ()
    """Fields of the prompt that this model's template has no use for."""


class TopLogprob(_Frozen):
    """A token that might have been sampled. `bytes` may be part of a character; control tokens give their name's."""

    token_id: int
    bytes: tuple[int, ...]
    logprob: float
    """Natural logarithm, under the model's distribution before bias, penalties, grammar and temperature."""


class TokenLogprob(TopLogprob):
    """A sampled token."""

    top_logprobs: tuple[TopLogprob, ...]
    """As many as were asked for, likeliest first; the sampled one need not be among them."""


class PromptToken(_Frozen):
    """A token of the prompt. The first has no log probability, as it follows nothing."""

    token_id: int
    bytes: tuple[int, ...]
    logprob: float | None = None
    rank: int | None = None
    """One more than how many tokens were likelier."""
    top_logprobs: tuple[TopLogprob, ...] = ()
    """As many as were asked for, likeliest first; this token need not be among them."""


class PromptTokens(_Frozen):
    """The next tokens of the prompt, where the request wants them told: each once, in order, before any `Delta`."""

    type: Literal["prompt"] = "prompt"
    tokens: tuple[PromptToken, ...]


class Delta(_Frozen):
    """New output. `text` may lag behind `token_ids` while a character or a possible stop string is incomplete."""

    type: Literal["delta"] = "delta"
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of those tokens that show in the text (stop tokens don't), when the request asked for them, and of a stop token
    where it `lists_stop_token`."""


class Finished(_Frozen):
    """The end of a stream that went well (or was aborted by its client)."""

    type: Literal["finished"] = "finished"
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were in the KV cache from an earlier request and were not computed again."""
    stop_string: str | None = None
    """Which of the request's stop strings ended the output; None when none did."""


class Failed(_Frozen):
    """The end of a stream that the engine could not finish."""

    type: Literal["failed"] = "failed"
    message: str
    is_final: bool = False
    """Whether what was asked is the reason, so that no other engine would finish it either."""
    is_suspect: bool = False
    """Whether the group stopped making progress while it computed this: it may be what did that."""
    was_waiting: bool = False
    """Whether it waited for its turn when the group ended, and so had no part in that. Written only where it is true:
    gateways from before know no such field, and would read nothing of this."""

    @model_serializer(mode="wrap")
    def _as_known_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name != "was_waiting" or value}


Event = Annotated[Admitted | PromptTokens | Delta | Finished | Failed, Field(discriminator="type")]


class ErrorCode(StrEnum):
    """Machine-readable refusal codes."""

    INVALID_VALUE = "invalid_value"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    NO_CHAT_TEMPLATE = "no_chat_template"
    NOT_READY = "not_ready"
    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    KEY_MISSING = "key_missing"
    """The request shows none of the engine's keys."""


class EngineError(_Frozen):
    """Body of a refusal. `param` names the offending field in OpenAI's words (`messages`, `prompt`, `max_tokens`)."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_seconds: float | None = None


class TokenizeRequest(_Frozen):
    """`POST /v1/tokenize`. `add_special_tokens` None does what generation does with such a prompt."""

    prompt: Prompt
    add_special_tokens: bool | None = None
    with_texts: bool = False


class Tokenized(_Frozen):
    """The ids of a prompt; `texts` are the tokens by themselves, as the vocabulary writes them."""

    token_ids: tuple[int, ...]
    max_model_len: int
    texts: tuple[str, ...] | None = None


class DetokenizeRequest(_Frozen):
    """`POST /v1/detokenize`."""

    token_ids: tuple[int, ...] = Field(fail_fast=True)


class Detokenized(_Frozen):
    """Text of some token ids, control tokens written out."""

    text: str


class HeldPrefixes(_Frozen):
    """`GET /v1/prefixes`: beginnings of prompts that need not be computed again, by the names that requests gave."""

    keys: tuple[str, ...]


class ModelInfo(_Frozen):
    """`GET /v1/info`: what this engine serves."""

    served_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    extra: dict[str, Any] = {}
