"""The engine's HTTP interface to the gateway: request, events, errors.

`POST /v1/multiplexed` (`multiplexing`) generates for many `GenerateRequest`s over one connection. The response to each
is one `Event` per line: exactly one `Admitted`, any number of `PromptTokens`, any number of `Delta`, then exactly one
`Finished` or `Failed`. Every few seconds a blank line reports that the request still waits, in the queue or before it;
readers skip it. A request that is refused before admission gets a `Refused` instead. All routes except the probes need
a key (`engine_access`). `POST /v1/generate`, for debugging an engine, responds to one `GenerateRequest` with the same
lines. It refuses the request with a 4xx or 503 and an `EngineError` body. Closing its connection aborts the request.
`POST /v1/tokenize` and `POST /v1/detokenize` convert a prompt to token ids and ids to text, as for a request. `POST
/v1/drain` stops admission and lets streams finish. `GET /status` is `health.EngineStatus`. `GET /v1/prefixes` returns
the prompt prefixes in the prefix cache, by the names that requests gave them.

Readers ignore unknown fields, so that a gateway and an engine of adjacent versions work together.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final, Self, cast

import msgspec
from msgspec import Meta


class UnreadableError(ValueError):
    """The JSON is no value of the expected type. The message contains the rule, and the place as `$.path`."""


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """JSON messages between gateway and engine. Values are validated when they are read, not when they are created.

    Fields at their defaults are omitted; readers ignore unknown fields.
    """

    def to_json(self) -> bytes:
        return _encoder.encode(self)

    @classmethod
    def from_json(cls, content: bytes | bytearray) -> Self:
        """Raises UnreadableError."""
        return cast(Self, _read(msgspec.json.decode, content, type=cls))


_encoder: Final = msgspec.json.Encoder()
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _read(decode: Callable[..., Any], content: bytes | bytearray, **options: Any) -> Any:
    try:
        return decode(content, **options)
    except _UNREADABLE as error:
        raise UnreadableError(str(error)) from None


def read_json(content: bytes | bytearray) -> Any:
    """Raises UnreadableError."""
    return _read(msgspec.json.decode, content)


class ToolCall(Wire, frozen=True):
    """A tool call in an earlier turn of the assistant."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    """An object; a string if the model's output is no object, because it was cut off or malformed."""


class ChatMessage(Wire, frozen=True):
    """One turn of a chat, rendered by the model's chat template."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """In a turn of role `tool`: the id of the call that this result belongs to."""
    name: str | None = None
    reasoning: str | None = None
    """The assistant's earlier reasoning content; the template decides how much of it is rendered."""
    is_content_null: bool = False
    """The client sent null for the content, which is then empty; some templates distinguish the two."""


class ToolFunction(Wire, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}


class ToolCallFormat(StrEnum):
    """The model's format of tool calls, derived from its chat template."""

    TAGGED = "tagged"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` for each call; text before it is allowed."""
    OBJECT = "object"
    """The whole answer is `{"name": …, "parameters": {…}}`."""
    ARRAY = "array"
    """The whole answer is `[{"name": …, "arguments": {…}}, …]`."""


class ThoughtStart(StrEnum):
    """Where the reasoning of an answer begins; it ends with `</think>`."""

    TAGGED = "tagged"
    """After a `<think>` at the start of the answer, if there is one."""
    OPEN = "open"
    """At the start: the prompt ended within the reasoning."""


MAX_TEMPLATE_ARGUMENTS = 16
MAX_ARGUMENT_CHARACTERS = 1024
TemplateArgument = Annotated[str, Meta(max_length=MAX_ARGUMENT_CHARACTERS)] | bool | int | float | None
MAX_MESSAGES = 8192
"""Per chat: a template renders each of them."""


class ChatPrompt(Wire, frozen=True, tag_field="kind", tag="chat"):
    """Messages to render with the chat template; the generation prompt is added by default."""

    messages: Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: tuple[ToolFunction, ...] = ()
    """Rendered by the template."""
    tools_guided: bool = False
    """The answer is constrained to a schema of tool calls, so the model needs no call format and no template with
    tools.
    """
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends with the text of the last message, which the answer continues."""
    template_arguments: Annotated[dict[str, TemplateArgument], Meta(max_length=MAX_TEMPLATE_ARGUMENTS)] = {}
    """More variables for the template."""
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    """Reasoning effort, if the template supports it; `none` disables reasoning."""


class TextPrompt(Wire, frozen=True, tag_field="kind", tag="text"):
    """Raw text, tokenized without a template."""

    text: str


class TokenPrompt(Wire, frozen=True, tag_field="kind", tag="tokens"):
    """Token ids, used unchanged."""

    token_ids: Annotated[tuple[int, ...], Meta(min_length=1)]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


MAX_TOP_LOGPROBS = 20
MAX_STOP_CHARACTERS = 256
"""Per stop string: each character of an answer is compared with it, and up to its length of text is held back."""
MAX_SCHEMA_CHARACTERS = 65536
MAX_REGEX_CHARACTERS = 32768
MAX_GRAMMAR_CHARACTERS = 32768
REGEX_MARK = "regex:"
"""Prefix of a grammar that is a regular expression. A grammar without a prefix is a JSON schema; no JSON text starts
with one.
"""
GRAMMAR_MARK = "grammar:"
"""Prefix of a grammar in Lark or GBNF."""
MAX_SALT_CHARACTERS = 256
MAX_ALLOWED_TOKENS = 16384
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 128


class SamplingParams(Wire, frozen=True):
    """How the next token is sampled. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing.

    None takes the value of the model's `generation_config.json` if that is used, otherwise temperature 1 and no
    filters. None is never serialized, so an engine that does not know the field treats it the same.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Tokens less likely than this times the likeliest are excluded."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off."""
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from a token's logit for each time it was generated."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from a token's logit once it was generated."""
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)] = {}
    """Token id -> added to its logit."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Drawn by the gateway if the client sends none; noise is keyed by (seed, choice, position)."""
    choice: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Index of this answer among several answers to one prompt."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens to report with each token; None reports no log probabilities."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens to report with each prompt token; None reports no log probabilities of the
    prompt. If set, the whole prompt is computed, regardless of the prefix cache.
    """
    prompt_told: Annotated[int, Meta(ge=0)] | None = None
    """Report the prompt's tokens (`PromptTokens`), except this number, which an earlier engine has reported; None:
    don't.
    """
    lists_stop_token: bool | None = None
    """Whether to report log probabilities of a stop token too, although it is not in the text. The last ones then
    belong to the last token, as clients that sum the log probabilities of a text expect.
    """
    prompt_only: bool | None = None
    """Whether only the prompt's log probabilities are wanted and no output; `max_tokens` is then 1."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """None allows as many as fit into the context."""
    json_schema: Annotated[str, Meta(max_length=MAX_SCHEMA_CHARACTERS)] | None = None
    """A JSON schema, serialized as JSON, for the answer's text; refusals name it `response_format`."""
    regex: Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_CHARACTERS)] | None = None
    """A regular expression that matches the whole text of the answer."""
    grammar: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)] | None = None
    """A context-free grammar in Lark or GBNF for the whole text of the answer. At most one of `json_schema`, `regex`
    and `grammar` is set.
    """
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Minimum number of tokens before a stop token or stop string can end the answer."""
    allowed_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_ALLOWED_TOKENS)] = ()
    """The only tokens that may be generated; empty: all."""
    bad_words: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)], ...],
        Meta(max_length=MAX_BAD_WORDS),
    ] = ()
    """Texts that are never generated, in their tokenization at the start of a text or after a space."""
    stop: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=64)] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Both are sent as one text with a prefix, and regular expressions have their own limit.
        for mark in (REGEX_MARK, GRAMMAR_MARK):
            if self.json_schema is not None and self.json_schema.startswith(mark):
                raise ValueError(f"a JSON schema can't begin with {mark!r}")

    @property
    def has_exclusions(self) -> bool:
        """Whether specific tokens are excluded from the answer."""
        return self.min_tokens > 0 or bool(self.allowed_token_ids) or bool(self.bad_words)

    @property
    def guide(self) -> str | None:
        """The answer's grammar as one text: a JSON schema, or a regular expression or grammar after its prefix."""
        if self.regex is not None:
            return REGEX_MARK + self.regex
        return self.json_schema if self.grammar is None else GRAMMAR_MARK + self.grammar


MAX_PREFIXES = 64
PrefixKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{12}$")]
"""Names a prompt prefix by its content; the gateway chooses the name, and the engine only repeats it."""
PromptPrefix = tuple[PrefixKey, Annotated[float, Meta(gt=0.0, le=1.0)]]
"""A prefix and its share of the prompt."""

LOWEST_PRIORITY = 1000
HIGHEST_PRIORITY = -1000


class GenerateRequest(Wire, frozen=True):
    """One completion to generate, from the start or from where another engine stopped.

    To resume, `generated_token_ids` contains the ids of all `Delta`s relayed so far; `prompt`, `sampling` and `seed`
    are the original ones. Limits, stop conditions, penalties, grammar and usage count these ids as output. `Delta`s
    only contain later tokens; `Finished.completion_tokens` counts all. If these ids already complete the output,
    `Finished` follows `Admitted` at once.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=128)]
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    generated_token_ids: tuple[int, ...] = ()
    """Tokens of this choice generated before, in order, at most `sampling.max_tokens`."""
    generated_characters: Annotated[int, Meta(ge=0)] | None = None
    """Characters (code points) of all text relayed before; new text starts after them. Callers should set it. None
    means the text released with these ids, but the `Delta`s relayed may include more, which the end of a stream had
    released.
    """
    adapter: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """The LoRA adapter to use; None: the model itself."""
    priority: Annotated[int, Meta(ge=HIGHEST_PRIORITY, le=LOWEST_PRIORITY)] = 0
    """Lower runs first; equal priorities are first come, first served."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """Only requests with the same salt share prefix cache entries; requests without one share among themselves."""
    prefixes: Annotated[tuple[PromptPrefix, ...], Meta(max_length=MAX_PREFIXES)] = ()
    """Prefixes of the prompt, the shortest first; the engine reports each while its cache holds it."""
    client_request_id: Annotated[str, Meta(max_length=128)] | None = None
    """The client's id of the request (`X-Request-Id`); not unique."""
    traceparent: Annotated[str, Meta(max_length=55)] | None = None
    """W3C trace context of the request, only for logs and spans."""
    tracestate: Annotated[str, Meta(max_length=512)] | None = None
    """Vendor-specific trace state, passed on unchanged."""


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Admitted(Wire, frozen=True, tag_field="type", tag="admitted"):
    """The request is admitted and its prompt tokenized."""

    prompt_tokens: int
    tool_call_format: ToolCallFormat | None = None
    """Format of tool calls in this answer; None if it has no tools or is constrained by a schema."""
    thoughts: ThoughtStart | None = None
    """Where reasoning may begin in this answer, by the model's chat template; None if it has none."""
    ignored: tuple[str, ...] = ()
    """Prompt fields that this model's template ignores."""


class TopLogprob(Wire, frozen=True):
    """A candidate token. `bytes` may be part of a character; control tokens have the bytes of their name."""

    token_id: int
    bytes: tuple[int, ...]
    logprob: float
    """Natural logarithm, under the model's distribution before bias, penalties, grammar and temperature."""


class TokenLogprob(TopLogprob, frozen=True):
    """A sampled token."""

    top_logprobs: tuple[TopLogprob, ...]
    """As many as requested, likeliest first; the sampled token need not be among them."""


class PromptToken(Wire, frozen=True):
    """A token of the prompt. The first has no log probability, because no token precedes it."""

    token_id: int
    bytes: tuple[int, ...]
    logprob: float | None = None
    rank: int | None = None
    """1 plus the number of likelier tokens."""
    top_logprobs: tuple[TopLogprob, ...] = ()
    """As many as requested, likeliest first; this token need not be among them."""


class PromptTokens(Wire, frozen=True, tag_field="type", tag="prompt"):
    """The next prompt tokens, if the request asks for them: each once, in order, before any `Delta`."""

    tokens: tuple[PromptToken, ...]


class Delta(Wire, frozen=True, tag_field="type", tag="delta"):
    """New output. `text` may lag behind `token_ids` while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens in the text, if requested. A stop token has no text; it is included with `lists_stop_token`."""


class Finished(Wire, frozen=True, tag_field="type", tag="finished"):
    """The end of a successful stream, or of one that its client aborted."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens reused from the KV cache of an earlier request."""
    stop_string: str | None = None
    """The stop string that ended the output; None if none did."""


class Failed(Wire, frozen=True, tag_field="type", tag="failed"):
    """The end of a stream that the engine could not finish."""

    message: str
    is_final: bool = False
    """Whether the request itself is the cause, so that every other engine would fail too."""
    is_suspect: bool = False
    """Whether the group stopped making progress during this request: it may be the cause."""
    was_waiting: bool = False
    """Whether it was still queued when the group ended, so that it can't be the cause."""


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
    """The request has none of the engine's keys."""


class ContextExceeded(Wire, frozen=True):
    """The prompt is too long, alone or with its `max_tokens`."""

    limit_tokens: int
    prompt_tokens: int | None = None
    prompt_characters: int | None = None
    """Set if the prompt is so long that its tokens were not counted."""
    max_tokens: int | None = None


class EngineError(Wire, frozen=True):
    """Body of a refusal. `param` names the offending field as OpenAI does (`messages`, `prompt`, `max_tokens`)."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_seconds: float | None = None
    exceeded: ContextExceeded | None = None
    """The numbers of the message, for a prompt that is too long."""


class Refused(Wire, frozen=True, tag_field="type", tag="refused"):
    """The only event of a refused stream."""

    error: EngineError


Event = Admitted | PromptTokens | Delta | Finished | Failed | Refused
_events: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)


def read_event(line: bytes) -> Event:
    """Raises UnreadableError."""
    return cast(Event, _read(_events.decode, line))


class TokenizeRequest(Wire, frozen=True):
    """`POST /v1/tokenize`. `add_special_tokens` None does the same as generation does with such a prompt."""

    prompt: Prompt
    add_special_tokens: bool | None = None
    with_texts: bool = False


class Tokenized(Wire, frozen=True):
    """The ids of a prompt; `texts` are the single tokens as the vocabulary spells them."""

    token_ids: tuple[int, ...]
    max_model_len: int
    texts: tuple[str, ...] | None = None


class DetokenizeRequest(Wire, frozen=True):
    """`POST /v1/detokenize`."""

    token_ids: tuple[int, ...]


class Detokenized(Wire, frozen=True):
    """Text of token ids, including control tokens."""

    text: str


class HeldPrefixes(Wire, frozen=True):
    """`GET /v1/prefixes`: cached prompt prefixes, by the names that requests gave them."""

    keys: tuple[str, ...]


class ModelInfo(Wire, frozen=True):
    """`GET /v1/info`: the engine's model."""

    served_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    extra: dict[str, Any] = {}
