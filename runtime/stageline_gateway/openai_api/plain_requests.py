"""A short way for plain requests: from a body's bytes to what the engine gets, with little code and data on the way.

Nearly all requests ask for one answer to a text or to a chat of texts, with a handful of fields. Read by the general
way (`validation`, `translate`), each touches all that the rarest field needs, and as the processor's caches have lost
it since the last request, that is what it costs. Here such a body is decoded straight into its checked fields.

What is taken here, the general way takes too, and makes the same of it: but for what is drawn, nobody can tell which
way a request went. All else is None and left to the general way: what is wrong, fields that are not listed here, null
where it is not a field's default. So no request is refused here, and no field is ignored.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta
from pydantic import BaseModel

from stageline_api.engine_http import (
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
)
from stageline_gateway.openai_api.answer_shapes import ChatShape, CompletionShape, ShapeOfChoice
from stageline_gateway.openai_api.request_types import DEFAULT_COMPLETION_TOKENS, INT32_MAX
from stageline_gateway.openai_api.translate import SEED_MASK, Prepared, drawn

TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    include_usage: bool | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True, frozen=True, gc=False, kw_only=True):
    """What both APIs have, with the bounds of `request_types`; it satisfies `translate.Asked`."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    n: Literal[1] = 1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None

    num_prompts: ClassVar[int] = 1
    num_choices: ClassVar[int] = 1
    num_echoes: ClassVar[int] = 0
    asked_top_logprobs: ClassVar[None] = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class _Completion(_Request, frozen=True, gc=False, kw_only=True):
    prompt: str
    logprobs: None = None
    """Benchmarks send it as null."""

    limit_name: ClassVar[str] = "max_tokens"
    schema_field: ClassVar[str] = "structured_outputs"


class _Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    role: Literal["system", "user", "assistant"]
    content: str


class _Chat(_Request, frozen=True, gc=False, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None

    schema_field: ClassVar[str] = "response_format"

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


_COMPLETIONS: Final = msgspec.json.Decoder(_Completion)
_CHATS: Final = msgspec.json.Decoder(_Chat)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Plain = Callable[[bytes | bytearray], Prepared | None]
"""The short way of one API."""


def plain_completion(raw: bytes | bytearray) -> Prepared | None:
    """The request of a body of `/v1/completions`; None where it is not plain."""
    try:
        asked = _COMPLETIONS.decode(raw)
    except _UNREADABLE:
        return None
    prompt = _made(TextPrompt, _TEXT, {"text": asked.prompt})
    return _prepared(asked, "cmpl-", prompt, asked.max_tokens or DEFAULT_COMPLETION_TOKENS, CompletionShape)


def plain_chat(raw: bytes | bytearray) -> Prepared | None:
    """The request of a body of `/v1/chat/completions`; None where it is not plain."""
    try:
        asked = _CHATS.decode(raw)
    except _UNREADABLE:
        return None
    if asked.max_completion_tokens is not None and asked.max_tokens is not None:
        return None
    told = [_made(ChatMessage, _MESSAGE, {"role": one.role, "content": one.content}) for one in asked.messages]
    prompt = _made(ChatPrompt, _CHAT, {"messages": tuple(told)})
    return _prepared(asked, "chatcmpl-", prompt, asked.max_tokens or asked.max_completion_tokens, ChatShape)


def _prepared(
    asked: _Completion | _Chat, kind: str, prompt: Prompt, max_tokens: int | None, shape: ShapeOfChoice
) -> Prepared | None:
    if asked.stream_options is not None and not asked.stream:
        return None
    request_id, drawn_seed = drawn(kind)
    stop = asked.stop or ()
    sampling: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "frequency_penalty": asked.frequency_penalty,
        "presence_penalty": asked.presence_penalty,
        "seed": (drawn_seed if asked.seed is None else asked.seed) & SEED_MASK,
        "max_tokens": max_tokens,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "ignore_eos": asked.ignore_eos,
    }
    given = {"request_id": request_id, "prompt": prompt, "sampling": _made(SamplingParams, _SAMPLING, sampling)}
    return Prepared(asked, _made(GenerateRequest, _GENERATE, given), shape)


Model = TypeVar("Model", bound=BaseModel)


def _usual(model: type[BaseModel]) -> Mapping[str, Any]:
    """All fields of `model` in their order, with their defaults, or None for those that are always given."""
    return {name: None if field.is_required() else field.default for name, field in model.model_fields.items()}


_TEXT: Final = _usual(TextPrompt)
_MESSAGE: Final = _usual(ChatMessage)
_CHAT: Final = _usual(ChatPrompt)
_SAMPLING: Final = _usual(SamplingParams)
_GENERATE: Final = _usual(GenerateRequest)
_put_fields: Final = BaseModel.__dict__["__dict__"].__set__
_put_names: Final = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_put_extra: Final = BaseModel.__dict__["__pydantic_extra__"].__set__
_put_private: Final = BaseModel.__dict__["__pydantic_private__"].__set__


def _made(model: type[Model], usual: Mapping[str, Any], given: dict[str, Any]) -> Model:
    """A `model` of values that have been checked: what `model_construct` makes with a look at each of its fields."""
    made = object.__new__(model)
    _put_fields(made, {**usual, **given})
    _put_names(made, set(given))
    _put_extra(made, None)
    _put_private(made, None)
    return made
