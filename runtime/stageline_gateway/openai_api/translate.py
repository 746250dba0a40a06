"""A body's fields as a checked request and what the engine gets of it. Without I/O.

Seeds: OpenAI takes any integer, the engine 0 .. 2**63-1; a client's seed keeps its lowest 63 bits (-1 becomes
2**63-1), so equal seeds stay equal. A client that gives none gets one drawn here.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec import structs

from stageline_api.engine_http import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    ToolFunction,
)
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.answer_shapes import ChatShape, CompletionShape, Dialect, ShapeOfChoice, Stamp
from stageline_gateway.openai_api.chat_types import MadeCall, Message, Tool, arguments_of
from stageline_gateway.openai_api.client_names import ClientNames
from stageline_gateway.openai_api.request_types import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest
from stageline_gateway.openai_api.schemas import without_idle_names
from stageline_gateway.openai_api.tool_shape import shape_with_tools
from stageline_gateway.openai_api.validation import IgnoredFields, parse_chat, parse_completion

SEED_MASK: Final = 2**63 - 1
_ID_BYTES: Final = 16
_SEED_BYTES: Final = 8


def drawn(kind: str) -> tuple[str, int]:
    """An id for a request, which begins with `kind`, and a seed for it. The kernel is asked once for both."""
    drawn_bytes = os.urandom(_ID_BYTES + _SEED_BYTES)
    return kind + drawn_bytes[:_ID_BYTES].hex(), int.from_bytes(drawn_bytes[_ID_BYTES:], "big") & SEED_MASK


def _sampling(request: ChatRequest | CompletionRequest, max_tokens: int | None, drawn_seed: int) -> SamplingParams:
    lists_stop_token = bool(request.num_echoes) and request.asked_top_logprobs is not None
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(0, request.top_k),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()},
        seed=(drawn_seed if request.seed is None else request.seed) & SEED_MASK,
        max_tokens=max_tokens,
        stop=request.stops,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        top_logprobs=request.asked_top_logprobs,
        prompt_logprobs=request.asked_prompt_logprobs,
        prompt_told=0 if request.wants_prompt else None,
        lists_stop_token=lists_stop_token or None,
        json_schema=without_idle_names(request.schema_text),
        regex=request.regex_text,
        grammar=request.grammar_text,
        min_tokens=request.min_tokens,
        allowed_token_ids=tuple(request.allowed_token_ids),
        bad_words=tuple(request.bad_words),
    )


def _call(call: MadeCall) -> ToolCall:
    return ToolCall(id=call.id, name=call.function.name, arguments=arguments_of(call))


def _message(message: Message) -> ChatMessage:
    """`developer` is OpenAI's newer word for `system`; templates know the older.

    An empty text beside calls is null, as clients write either and templates tell a turn of calls alone by null.
    """
    text = message.text
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=text,
        tool_calls=tuple(_call(call) for call in message.tool_calls or []),
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.thoughts,
        is_content_null=message.content is None or bool(message.tool_calls and not text),
    )


def _function(tool: Tool) -> ToolFunction:
    function = tool.function
    return ToolFunction(name=function.name, description=function.description, parameters=function.parameters or {})


def prompt_of_chat(request: ChatRequest) -> ChatPrompt:
    prompt = ChatPrompt(
        messages=tuple(map(_message, request.messages)),
        tools=tuple(map(_function, request.offered_tools)),
        tools_guided=request.choice_of_tool not in ("none", "auto"),
    )
    if request.chat_template_kwargs or request.reasoning_effort is not None:
        arguments, effort = request.chat_template_kwargs, request.reasoning_effort
        prompt = structs.replace(prompt, template_arguments=arguments, reasoning_effort=effort)
    if request.continue_final_message or not request.add_generation_prompt:
        goes_on = request.continue_final_message
        prompt = structs.replace(prompt, add_generation_prompt=False, continue_final_message=goes_on)
    return prompt


def chat_to_generate(request: ChatRequest, request_id: str, drawn_seed: int) -> GenerateRequest:
    max_tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    return GenerateRequest(
        request_id=request_id,
        prompt=prompt_of_chat(request),
        sampling=_sampling(request, max_tokens, drawn_seed),
        cache_salt=request.cache_salt,
    )


def prompts_of(request: CompletionRequest) -> tuple[Prompt, ...]:
    """Its prompts, in order."""
    return tuple(
        TextPrompt(text=prompt) if isinstance(prompt, str) else TokenPrompt(token_ids=tuple(prompt))
        for prompt in request.prompts
    )


def completion_to_generate(
    request: CompletionRequest, prompt: Prompt, request_id: str, drawn_seed: int
) -> GenerateRequest:
    if request.max_tokens == 0:
        sampling = structs.replace(_sampling(request, 1, drawn_seed), prompt_only=True)
    else:
        sampling = _sampling(request, request.max_tokens or DEFAULT_COMPLETION_TOKENS, drawn_seed)
    return GenerateRequest(request_id=request_id, prompt=prompt, sampling=sampling, cache_salt=request.cache_salt)


class Prepared(NamedTuple):
    """A checked request, as the client sent it, but for a chat's messages, and as the engine gets it."""

    asked: ChatRequest | CompletionRequest
    generate: GenerateRequest
    shape_of: ShapeOfChoice
    ignored: tuple[str, ...] = ()
    """Names of fields that were left out."""
    prompts: tuple[Prompt, ...] = ()
    """All prompts, where there are several."""
    dialect: Callable[[Stamp], Dialect] | None = None
    """Makes what writes the answer, in another API than OpenAI's chats and completions."""
    names: ClientNames = ClientNames()
    """What that API's client calls the chat's fields."""

    def to_client_error(self, error: ApiError) -> ApiError:
        """The engine's refusal with the client's own names for fields that have several."""
        own = {"max_tokens": self.asked.limit_name, "response_format": self.asked.schema_field}
        return error.renamed(lambda path: self.names.of(own.get(path, path)))


Prepare = Callable[[Mapping[str, Any], bool], Prepared]
"""Checks a body's fields; the second argument is whether fields that could be ignored are refused."""


def prepare_chat(fields: Mapping[str, Any], strict: bool) -> Prepared:
    return _prepared_chat(fields, {}, strict, "chatcmpl-")


def prepare_as_chat(
    fields: Mapping[str, Any],
    ignored: IgnoredFields,
    strict: bool,
    kind: str,
    dialect: Callable[[Stamp], Dialect],
    names: ClientNames,
) -> Prepared:
    """A request of another API, whose `fields` are those of a chat by now; `ignored` is what was left out before."""
    try:
        chat = _prepared_chat(fields, ignored, strict, f"{kind}_")
    except ApiError as error:
        raise error.renamed(names.of) from None
    return chat._replace(dialect=dialect, names=names, ignored=tuple(map(names.of, chat.ignored)))


def _prepared_chat(fields: Mapping[str, Any], ignored: IgnoredFields, strict: bool, kind: str) -> Prepared:
    asked = parse_chat(fields, ignored, strict)
    plain = partial(ChatShape, prompt_logprobs=asked.prompt_logprobs, goes_on=asked.goes_on)
    shape = shape_with_tools(asked) if asked.offered_tools else plain
    generate = chat_to_generate(asked, *drawn(kind))
    # Whose texts are joined there: held twice they would be, for as long as the answer takes.
    return Prepared(structs.replace(asked, messages=[]), generate, shape, tuple(ignored))


def prepare_completion(fields: Mapping[str, Any], strict: bool) -> Prepared:
    ignored: IgnoredFields = {}
    asked = parse_completion(fields, ignored, strict)
    prompts = prompts_of(asked)
    generate = completion_to_generate(asked, prompts[0], *drawn("cmpl-"))

    def shape(index: int) -> CompletionShape:
        prompt = asked.prompts[index // asked.n]
        text = prompt if isinstance(prompt, str) else ""
        return CompletionShape(
            index,
            prompt_logprobs=asked.prompt_logprobs,
            echo=text if asked.echo else None,
            top_logprobs=asked.logprobs,
        )

    return Prepared(asked, generate, shape, tuple(ignored), prompts if len(prompts) > 1 else ())
