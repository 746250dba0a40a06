"""The engine's HTTP interface towards the gateway: request, events, errors.

`POST /v1/multiplexed` (`multiplexing`) generates for many `GenerateRequest`s over one connection. Each is answered with
one `Event` per line: exactly one `Admitted`, any number of `PromptTokens`, any number of `Delta`, then exactly one
`Finished` or `Failed`. A blank line, every few seconds, says that the request still waits, for its turn while the group
works or for what it needs before; readers skip it. A request that is refused before it is admitted gets a `Refused`
instead. All but the probes ask for a key (`engine_access`).
`POST /v1/generate`, for people who debug an engine, answers one `GenerateRequest` with the same lines, and refuses it
with a 4xx or 503 and an `EngineError` body. Closing its connection aborts the request.
`POST /v1/tokenize` and `POST /v1/detokenize` turn a prompt into ids and ids into text, as a request's would be.
`POST /v1/drain` stops admission and lets streams finish. `GET /status` is `health.EngineStatus`.
`GET /v1/prefixes` says which beginnings of prompts the prefix cache holds, by the names that requests gave them.

Readers ignore fields they don't know, so a gateway and an engine of neighbouring versions work together.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final, Self, cast

import msgspec
from msgspec import Meta


class UnreadableError(ValueError):
    """What came is no value of the type that belongs there. The text says the rule, and the place as `$.path`."""


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What goes between gateway and engine, as JSON. Values are checked where they are read, not where they are made.

    Fields at their defaults are left out, and fields that a reader doesn't know are ignored.
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
    """A call of a tool in an earlier turn of the assistant."""

    id: str
    name: str
    arguments: dict[str, Any] | str
    """An object; a text where what the model wrote is none, as the token limit cut it off, or it was wrong."""


class ChatMessage(Wire, frozen=True):
    """One turn of a chat; rendered by the model's own chat template."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """In a turn of role `tool`: the call that this is the result of."""
    name: str | None = None
    reasoning: str | None = None
    """What the assistant thought before; templates decide how much of it the model sees again."""
    is_content_null: bool = False
    """The client sent null for the content, which is empty then; some templates tell the two apart."""


class ToolFunction(Wire, frozen=True):
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
TemplateArgument = Annotated[str, Meta(max_length=MAX_ARGUMENT_CHARACTERS)] | bool | int | float | None
MAX_MESSAGES = 8192
"""Of one chat: a template runs over each of them."""


class ChatPrompt(Wire, frozen=True, tag_field="kind", tag="chat"):
    """Messages to render with the chat template, generation prompt added unless said otherwise."""

    messages: Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: tuple[ToolFunction, ...] = ()
    """Shown to the model by its template."""
    tools_guided: bool = False
    """The answer is held to a schema of calls, so it needs no format of the model's own, nor a template with tools."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends with the last message's words, which the answer continues."""
    template_arguments: Annotated[dict[str, TemplateArgument], Meta(max_length=MAX_TEMPLATE_ARGUMENTS)] = {}
    """More variables for the template."""
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    """How much to think, where the template takes that; `none` is not at all."""


class TextPrompt(Wire, frozen=True, tag_field="kind", tag="text"):
    """Raw text, tokenized as it is."""

    text: str


class TokenPrompt(Wire, frozen=True, tag_field="kind", tag="tokens"):
    """Token ids, used as they are."""

    token_ids: Annotated[tuple[int, ...], Meta(min_length=1)]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


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


class SamplingParams(Wire, frozen=True):
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 filter nothing.

    None is what the model's `generation_config.json` says where it is followed, else a temperature of 1 and all others
    off. It is never written: an engine that does not know of it takes a field that is missing for the same.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Tokens less likely than this times the likeliest are left out."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off."""
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from a token's logit for each time it was generated."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from a token's logit once it was generated."""
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)] = {}
    """Token id -> added to its logit."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Drawn by the gateway when the client gives none; noise is keyed by (seed, choice, position)."""
    choice: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Which of several answers to one prompt this is."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens to report with each token; None reports no log probabilities."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many of the likeliest tokens to tell with each of the prompt's; None tells no log probabilities of these.
    With them the prompt is computed whole, whatever the cache holds."""
    prompt_told: Annotated[int, Meta(ge=0)] | None = None
    """The prompt's tokens are told (`PromptTokens`), but for so many that an engine before this one has told; None:
    they aren't."""
    lists_stop_token: bool | None = None
    """Whether log probabilities are reported of a stop token too, though it doesn't show in the text: then the last
    ones reported are those of the last token, as who adds up a text's expects it."""
    prompt_only: bool | None = None
    """Whether no output is wanted, only what is told of the prompt; `max_tokens` is 1 then."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """None allows as many as the context still holds."""
    json_schema: Annotated[str, Meta(max_length=MAX_SCHEMA_CHARACTERS)] | None = None
    """A JSON schema, written as JSON, that the answer's text satisfies; refusals name it `response_format`."""
    regex: Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_CHARACTERS)] | None = None
    """A regular expression that the whole of the answer's text matches."""
    grammar: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)] | None = None
    """A context-free grammar, as Lark or GBNF writes it, that the whole of the answer's text follows. An answer has one
    of `json_schema`, `regex` and `grammar` at most."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Before so many tokens are generated, neither a stop token nor a stop string ends the answer."""
    allowed_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_ALLOWED_TOKENS)] = ()
    """All that may be generated; empty: everything."""
    bad_words: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)], ...],
        Meta(max_length=MAX_BAD_WORDS),
    ] = ()
    """Texts that, as the tokenizer writes them at a beginning or after a blank, are never generated."""
    stop: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=64)] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # Both go their way as one text, and expressions have a bound of their own.
        for mark in (REGEX_MARK, GRAMMAR_MARK):
            if self.json_schema is not None and self.json_schema.startswith(mark):
                raise ValueError(f"a JSON schema can't begin with {mark!r}")

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
PrefixKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{12}$")]
"""Names the beginning of a prompt by its content; the gateway chooses how, and the engine only repeats it."""
PromptPrefix = tuple[PrefixKey, Annotated[float, Meta(gt=0.0, le=1.0)]]
"""A beginning and which share of the prompt it is."""

LOWEST_PRIORITY = 1000
HIGHEST_PRIORITY = -1000


class GenerateRequest(Wire, frozen=True):
    """One completion to generate, from its beginning or from where another engine left it.

    To continue, `generated_token_ids` holds the ids of all `Delta`s relayed so far, and `prompt`, `sampling` and `seed`
    are those of the first time. Limits, stop conditions, penalties, grammar and usage count these ids as output;
    `Delta`s carry what comes after them and `Finished.completion_tokens` counts them too. When they end the output
    already, `Finished` follows `Admitted` at once.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=128)]
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    generated_token_ids: tuple[int, ...] = ()
    """Tokens of this choice generated before, in order, no more than `sampling.max_tokens`."""
    generated_characters: Annotated[int, Meta(ge=0)] | None = None
    """Characters (code points) of all text relayed before; the new text continues there. Best always given: None stands
    for the text released with these ids, and the `Delta`s relayed may end with more, which the end set free."""
    adapter: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """The LoRA adapter that answers in place of the model itself."""
    priority: Annotated[int, Meta(ge=HIGHEST_PRIORITY, le=LOWEST_PRIORITY)] = 0
    """Lower runs first; among equals, who came first."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    """Only requests with the same one share what the prefix cache holds; those without share among themselves."""
    prefixes: Annotated[tuple[PromptPrefix, ...], Meta(max_length=MAX_PREFIXES)] = ()
    """Beginnings of the prompt, the shortest first, to be told as held for as long as the cache holds them."""
    client_request_id: Annotated[str, Meta(max_length=128)] | None = None
    """What the client calls it (`X-Request-Id`); not unique."""
    traceparent: Annotated[str, Meta(max_length=55)] | None = None
    """W3C trace context of the request, for logs and spans; it changes nothing else."""
    tracestate: Annotated[str, Meta(max_length=512)] | None = None
    """What tracing systems add to it, as it came."""


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Admitted(Wire, frozen=True, tag_field="type", tag="admitted"):
    """The request holds a place; prompt tokenized."""

    prompt_tokens: int
    tool_call_format: ToolCallFormat | None = None
    """How calls are written in this answer; None when it was given no tools, or is held to a schema."""
    thoughts: ThoughtStart | None = None
    """How this answer may begin with thoughts, after the model's chat template; None when it doesn't."""
    ignored: tuple[str, ...] = ()
    """Fields of the prompt that this model's template has no use for."""


class TopLogprob(Wire, frozen=True):
    """A token that might have been sampled. `bytes` may be part of a character; control tokens give their name's."""

    token_id: int
    bytes: tuple[int, ...]
    logprob: float
    """Natural logarithm, under the model's distribution before bias, penalties, grammar and temperature."""


class TokenLogprob(TopLogprob, frozen=True):
    """A sampled token."""

    top_logprobs: tuple[TopLogprob, ...]
    """As many as were asked for, likeliest first; the sampled one need not be among them."""


class PromptToken(Wire, frozen=True):
    """A token of the prompt. The first has no log probability, as it follows nothing."""

    token_id: int
    bytes: tuple[int, ...]
    logprob: float | None = None
    rank: int | None = None
    """One more than how many tokens were likelier."""
    top_logprobs: tuple[TopLogprob, ...] = ()
    """As many as were asked for, likeliest first; this token need not be among them."""


class PromptTokens(Wire, frozen=True, tag_field="type", tag="prompt"):
    """The next tokens of the prompt, where the request wants them told: each once, in order, before any `Delta`."""

    tokens: tuple[PromptToken, ...]


class Delta(Wire, frozen=True, tag_field="type", tag="delta"):
    """New output. `text` may lag behind `token_ids` while a character or a possible stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of those tokens that show in the text (stop tokens don't), when the request asked for them, and of a stop token
    where it `lists_stop_token`."""


class Finished(Wire, frozen=True, tag_field="type", tag="finished"):
    """The end of a stream that went well (or was aborted by its client)."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were in the KV cache from an earlier request and were not computed again."""
    stop_string: str | None = None
    """Which of the request's stop strings ended the output; None when none did."""


class Failed(Wire, frozen=True, tag_field="type", tag="failed"):
    """The end of a stream that the engine could not finish."""

    message: str
    is_final: bool = False
    """Whether what was asked is the reason, so that no other engine would finish it either."""
    is_suspect: bool = False
    """Whether the group stopped making progress while it computed this: it may be what did that."""
    was_waiting: bool = False
    """Whether it waited for its turn when the group ended, and so had no part in that."""


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


class ContextExceeded(Wire, frozen=True):
    """A prompt that is too long, by itself or together with its `max_tokens`."""

    limit_tokens: int
    prompt_tokens: int | None = None
    prompt_characters: int | None = None
    """Where it is so long that its tokens weren't counted."""
    max_tokens: int | None = None


class EngineError(Wire, frozen=True):
    """Body of a refusal. `param` names the offending field in OpenAI's words (`messages`, `prompt`, `max_tokens`)."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_seconds: float | None = None
    exceeded: ContextExceeded | None = None
    """Of a prompt that is too long, the numbers of the message."""


class Refused(Wire, frozen=True, tag_field="type", tag="refused"):
    """The only event of a stream that the engine did not admit."""

    error: EngineError


Event = Admitted | PromptTokens | Delta | Finished | Failed | Refused
_events: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)


def read_event(line: bytes) -> Event:
    """Raises UnreadableError."""
    return cast(Event, _read(_events.decode, line))


class TokenizeRequest(Wire, frozen=True):
    """`POST /v1/tokenize`. `add_special_tokens` None does what generation does with such a prompt."""

    prompt: Prompt
    add_special_tokens: bool | None = None
    with_texts: bool = False


class Tokenized(Wire, frozen=True):
    """The ids of a prompt; `texts` are the tokens by themselves, as the vocabulary writes them."""

    token_ids: tuple[int, ...]
    max_model_len: int
    texts: tuple[str, ...] | None = None


class DetokenizeRequest(Wire, frozen=True):
    """`POST /v1/detokenize`."""

    token_ids: tuple[int, ...]


class Detokenized(Wire, frozen=True):
    """Text of some token ids, control tokens written out."""

    text: str


class HeldPrefixes(Wire, frozen=True):
    """`GET /v1/prefixes`: beginnings of prompts that need not be computed again, by the names that requests gave."""

    keys: tuple[str, ...]


class ModelInfo(Wire, frozen=True):
    """`GET /v1/info`: what this engine serves."""

    served_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    extra: dict[str, Any] = {}
