"""Turns a `GenerateRequest` into an `AdmittedRequest`: renders, tokenizes, and checks everything a stage relies on.

An admitted request can't fail in a stage: every id has an embedding row, the prompt is not empty, and prompt plus
output fit the context. An invalid request is refused with the field, the value and the rule. `schema_check` checks
JSON schemas instead, since that may take too long here.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, assert_never

from msgspec import structs

from stageline_api.engine_http import (
    MAX_STOP_CHARACTERS,
    ChatPrompt,
    ContextExceeded,
    ErrorCode,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    ThoughtStart,
    TokenPrompt,
    ToolCallFormat,
)
from stageline_runtime.engine.core_api import AdmittedRequest
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.chat_template import (
    ChatTemplate,
    no_chat_template,
    no_tool_format,
)
from stageline_runtime.engine.text.exclusions import with_exclusions
from stageline_runtime.engine.text.open_thoughts import (
    is_begun_for_the_answer,
    is_in_thought,
    may_have_begun,
    without_others_marks,
)
from stageline_runtime.engine.text.prompt_size import QUICK_LENGTH, least_characters, work_of
from stageline_runtime.engine.text.recent_prompts import RecentPrompts, written
from stageline_runtime.engine.text.template_files import DEFAULT_TEMPLATE, TOOL_TEMPLATE, read_tokenizer_config
from stageline_runtime.engine.text.tokenizer import EngineTokenizer, check_unicode
from stageline_runtime.plan_bus.messages import RequestSampling

NO_DEFAULTS: Final = SamplingParams()
LONGEST_ARGUMENT_NAME: Final = 64
_LEFT_OPEN: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Fields that the model's defaults fill when a request omits them."""

MOST_CHARACTERS_A_TOKEN = 16
"""On average over a prompt as long as the context: text has four, code less.

A prompt with more can be refused without tokenizing it, which takes seconds.
"""
QUICK_OUTPUT = 64
"""Generated ids to continue from become text again one by one; this many take a few milliseconds."""


class _Tokenized(NamedTuple):
    token_ids: tuple[int, ...]
    chat_text: str | None = None
    """The text that the template rendered from a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Checks requests against one model. Safe from any thread."""

    tokenizer: EngineTokenizer
    chat_template: ChatTemplate | None
    vocab_size: int
    """Rows of the model's embedding; ids run from 0 to one less."""
    max_model_len: int
    """Most tokens of prompt plus output."""
    eos_token_ids: frozenset[int]
    sampling_defaults: SamplingParams = NO_DEFAULTS
    """The model's own defaults, for fields that a request omits."""
    tool_template: ChatTemplate | None = None
    """Of chats with tools, where the model has one of its own for them."""
    _rendered_lately: RecentPrompts[_Tokenized] = field(default_factory=RecentPrompts, init=False, compare=False)
    _thoughts_lately: RecentPrompts[ThoughtStart | None] = field(
        default_factory=RecentPrompts, init=False, compare=False
    )

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        sampling_defaults: SamplingParams = NO_DEFAULTS,
    ) -> "PromptReader":
        """Load tokenizer and chat template of the model in `model_dir`.

        Raises:
            RuntimeFailure: class ModelLoad, naming the file.
        """
        config = read_tokenizer_config(model_dir)
        default, tool_use = (
            None if (source := config.chat_templates.get(name)) is None else ChatTemplate(source, config.special_tokens)
            for name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE)
        )
        return cls(
            tokenizer=EngineTokenizer.load(model_dir),
            chat_template=default,
            tool_template=tool_use,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(eos_token_ids),
            sampling_defaults=sampling_defaults,
        )

    def read(self, request: GenerateRequest) -> AdmittedRequest:
        """Check `request` and work out its token ids and limits.

        Raises:
            PromptError: naming the field of the request that can't be served.
        """
        began = time.perf_counter_ns()
        sampling = request.sampling
        for stop in sampling.stop:
            if not stop:
                raise PromptError(ErrorCode.INVALID_VALUE, "A stop string must not be empty.", param="stop")
            if len(stop) > MAX_STOP_CHARACTERS:
                message = f"A stop string has {len(stop)} characters; at most {MAX_STOP_CHARACTERS} are allowed."
                raise PromptError(ErrorCode.INVALID_VALUE, message, param="stop")
            check_unicode(stop, "stop")
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(sampling.logit_bias, "logit_bias")
        self._check_ids(sampling.allowed_token_ids, "allowed_token_ids")
        if sampling.guide is not None and sampling.ignore_eos:
            message = "ignore_eos can't be combined with response_format: the end of the JSON has to end the answer."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="ignore_eos")
        if sum(guide is not None for guide in (sampling.json_schema, sampling.regex, sampling.grammar)) > 1:
            message = "An answer has a JSON schema, a regex or a grammar, not several of them."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="regex" if sampling.regex else "grammar")
        self._check_ids(request.generated_token_ids, "generated_token_ids")
        prompt = request.prompt
        key = written(prompt)
        token_ids, chat_text = self._rendered_lately.made_of(key, lambda: self._rendered(prompt))
        sampling = _filled(sampling, self.sampling_defaults, self.max_model_len - len(token_ids))
        stop_token_ids = frozenset(sampling.stop_token_ids)
        admitted = AdmittedRequest(
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            sampling=_request_sampling(sampling, len(token_ids)),
            max_new_tokens=self._max_new_tokens(len(token_ids), sampling.max_tokens),
            stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids | self.eos_token_ids,
            stop=sampling.stop,
            tool_call_format=self.tool_call_format(request.prompt),
            thoughts=None
            if sampling.guide is not None
            else self._thoughts_lately.made_of(key, lambda: self._thoughts(prompt, chat_text)),
            ignored=self._ignored(request.prompt),
            prompt_told=sampling.prompt_told,
            is_prompt_only=bool(sampling.prompt_only),
            lists_stop_token=bool(sampling.lists_stop_token),
            generated_token_ids=request.generated_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            prefixes=tuple((name, math.ceil(share * len(token_ids))) for name, share in request.prefixes),
            adapter=request.adapter,
            is_chat=isinstance(request.prompt, ChatPrompt),
            traceparent=request.traceparent,
            tracestate=request.tracestate,
            began_nanoseconds=began,
        )
        _check_generated(admitted)
        _check_told(admitted)
        return (
            with_exclusions(admitted, sampling, self.tokenizer, self.vocab_size)
            if sampling.has_exclusions
            else admitted
        )

    def render_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of `prompt`: at least one, each within the vocabulary, leaving room for at least one more.

        Raises:
            PromptError: naming `messages` or `prompt`.
        """
        return self._rendered(prompt).token_ids

    def _rendered(self, prompt: Prompt) -> _Tokenized:
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        token_ids, chat_text = self._tokenize(prompt)
        self._check_ids(token_ids, param)
        if not token_ids:
            raise PromptError(ErrorCode.INVALID_VALUE, "The prompt is empty: it has no token.", param=param)
        if len(token_ids) > self.max_model_len - 1:
            message = (
                f"The prompt has {len(token_ids)} tokens, but this model takes at most {self.max_model_len - 1}: "
                f"its context is {self.max_model_len} tokens, and the answer needs at least one."
            )
            exceeded = ContextExceeded(prompt_tokens=len(token_ids), limit_tokens=self.max_model_len - 1)
            raise PromptError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=param, exceeded=exceeded)
        return _Tokenized(token_ids, chat_text)

    def tool_call_format(self, prompt: Prompt) -> ToolCallFormat | None:
        """How the answer to `prompt` writes calls of tools; None when it is given none, or is held to a schema."""
        template = self._template(prompt)
        if not isinstance(prompt, ChatPrompt) or not prompt.tools or prompt.tools_guided or template is None:
            return None
        return template.tool_call_format

    def _template(self, prompt: Prompt) -> ChatTemplate | None:
        """The template that makes a text of `prompt`, as transformers chooses it."""
        has_tools = isinstance(prompt, ChatPrompt) and bool(prompt.tools)
        return self.tool_template if has_tools and self.tool_template is not None else self.chat_template

    def _thoughts(self, prompt: Prompt, chat_text: str | None) -> ThoughtStart | None:
        """How the answer to `prompt` may begin with reasoning, as far as the template and the text before it show."""
        template = self._template(prompt)
        if not isinstance(prompt, ChatPrompt) or template is None or not template.has_thoughts:
            return None
        assert chat_text is not None, "a chat has been rendered"
        judged = without_others_marks(prompt)
        text = chat_text if judged is prompt else self._render(judged)
        is_open = is_in_thought(judged, text) or self._begins_thought(prompt, chat_text)
        return ThoughtStart.OPEN if is_open else ThoughtStart.TAGGED

    def _begins_thought(self, prompt: ChatPrompt, text: str) -> bool:
        """Whether the template itself starts the answer's reasoning."""
        if not prompt.add_generation_prompt or not may_have_begun(text):
            return False
        try:
            without = self._render(structs.replace(prompt, add_generation_prompt=False))
        except PromptError:
            return False
        return is_begun_for_the_answer(text, without)

    def _ignored(self, prompt: Prompt) -> tuple[str, ...]:
        """Names of the client's fields that the chat template has no use for."""
        template = self._template(prompt)
        if not isinstance(prompt, ChatPrompt) or template is None:
            return ()
        unread = [_argument(name) for name in prompt.template_arguments if not template.reads(name)]
        if not template.takes_reasoning and any(message.reasoning for message in prompt.messages):
            unread.append("messages.reasoning_content")
        if prompt.messages[0].role == "system" and not template.shows_system():
            unread.append("messages[system]")
        effort = prompt.reasoning_effort
        return (*unread, *(() if effort is None or template.takes_effort(effort) else ("reasoning_effort",)))

    def tokenize(self, prompt: Prompt, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Token ids of `prompt`, however many; None adds special tokens as generation would.

        Raises:
            PromptError: naming `messages`, `tools` or `prompt`.
        """
        token_ids = self._tokenize(prompt, add_special_tokens).token_ids
        self._check_ids(token_ids, "prompt")
        return token_ids

    def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Text of `token_ids` with control tokens written out; raises PromptError naming `tokens`."""
        self._check_ids(token_ids, "tokens")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _render(self, prompt: ChatPrompt) -> str:
        template = self._template(prompt)
        if template is None:
            raise no_chat_template()
        if prompt.tools and not prompt.tools_guided and template.tool_call_format is None:
            raise no_tool_format(template.takes_tools)
        self._check_length(least_characters(prompt, template.takes_tools), "messages")
        for message in prompt.messages:
            check_unicode(message.role, "messages")
            check_unicode(message.content, "messages")
            check_unicode(message.reasoning or "", "messages")
        arguments = template.arguments_of(prompt)
        if prompt.continue_final_message:
            text = template.render_to_continue(prompt.messages, prompt.tools, arguments)
        else:
            text = template.render(prompt.messages, prompt.tools, prompt.add_generation_prompt, arguments)
        self._check_length(len(text), "messages")
        return text

    def _tokenize(self, prompt: Prompt, add_special_tokens: bool | None = None) -> _Tokenized:
        match prompt:
            case ChatPrompt():
                text = self._render(prompt)
                ids = self.tokenizer.encode(text, add_special_tokens=bool(add_special_tokens), param="messages")
                return _Tokenized(ids, text)
            case TextPrompt(text=text):
                self._check_length(len(text), "prompt")
                return _Tokenized(self.tokenizer.encode(text, add_special_tokens=add_special_tokens is not False))
            case TokenPrompt(token_ids=token_ids):
                return _Tokenized(token_ids)
            case _:
                assert_never(prompt)

    def _check_length(self, characters: int, param: str) -> None:
        most = self.max_model_len * MOST_CHARACTERS_A_TOKEN
        if characters > most:
            message = (
                f"The prompt has {characters} characters; this model's context of {self.max_model_len} tokens takes "
                f"{most} at most."
            )
            exceeded = ContextExceeded(prompt_characters=characters, limit_tokens=self.max_model_len)
            raise PromptError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param=param, exceeded=exceeded)

    def _check_ids(self, token_ids: Iterable[int], param: str) -> None:
        for index in token_ids:
            if not 0 <= index < self.vocab_size:
                message = f"Token id {index} is not in this model's vocabulary: ids are 0 to {self.vocab_size - 1}."
                raise PromptError(ErrorCode.INVALID_VALUE, message, param=param)

    def _max_new_tokens(self, prompt_tokens: int, max_tokens: int | None) -> int:
        room = self.max_model_len - prompt_tokens
        if max_tokens is None:
            return room
        if max_tokens > room:
            message = (
                f"The prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together "
                f"{prompt_tokens + max_tokens}, but this model's context is {self.max_model_len} tokens; "
                f"lower max_tokens to {room} or shorten the prompt."
            )
            exceeded = ContextExceeded(
                prompt_tokens=prompt_tokens, max_tokens=max_tokens, limit_tokens=self.max_model_len
            )
            raise PromptError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, param="max_tokens", exceeded=exceeded)
        return max_tokens


def _check_generated(request: AdmittedRequest) -> None:
    """Refuse output that can't have come from this request.

    Raises:
        PromptError: naming `generated_token_ids`: more of them than the answer may have, or one follows a stop token.
    """
    generated = request.generated_token_ids
    if len(generated) > request.max_new_tokens:
        message = (
            f"{len(generated)} generated_token_ids are more than this answer may have: max_tokens, or what the "
            f"context leaves, is {request.max_new_tokens}."
        )
        raise PromptError(ErrorCode.INVALID_VALUE, message, param="generated_token_ids")
    for index in generated[:-1]:
        if index in request.stop_token_ids:
            message = f"generated_token_ids go on after {index}, which ends the answer."
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="generated_token_ids")


def _check_told(request: AdmittedRequest) -> None:
    """Refuse a prompt with fewer tokens than were reported before, or a prompt-only request that also wants output.

    Raises:
        PromptError: naming `prompt_told` or `prompt_only`.
    """
    if request.is_prompt_only and request.max_new_tokens != 1:
        message = f"prompt_only = true wants max_tokens = 1, not {request.max_new_tokens}."
        raise PromptError(ErrorCode.INVALID_VALUE, message, param="prompt_only")
    num_tokens = len(request.prompt_token_ids)
    if (request.prompt_told or 0) > num_tokens:
        message = f"prompt_told is {request.prompt_told}, but the prompt has {num_tokens} tokens."
        raise PromptError(ErrorCode.INVALID_VALUE, message, param="prompt_told")


def _filled(sampling: SamplingParams, defaults: SamplingParams, room_tokens: int) -> SamplingParams:
    """`sampling` with the model's values where it has none; they never make an answer longer than `room_tokens`."""
    missing = {name: getattr(defaults, name) for name in _LEFT_OPEN if getattr(sampling, name) is None}
    if missing.get("max_tokens") is not None:
        missing["max_tokens"] = min(missing["max_tokens"], room_tokens)
    return structs.replace(sampling, **missing)


def _request_sampling(sampling: SamplingParams, num_prompt_tokens: int) -> RequestSampling:
    """A request's parameters for the sampler; the engine applies limits and stops."""
    return RequestSampling(
        temperature=_or(sampling.temperature, _OFF.temperature),
        top_p=_or(sampling.top_p, _OFF.top_p),
        top_k=_or(sampling.top_k, _OFF.top_k),
        seed=sampling.seed,
        choice=sampling.choice,
        min_p=_or(sampling.min_p, _OFF.min_p),
        repetition_penalty=_or(sampling.repetition_penalty, _OFF.repetition_penalty),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple(sampling.logit_bias.items()),
        num_top_logprobs=sampling.top_logprobs,
        json_schema=sampling.guide,
        num_prompt_tokens=num_prompt_tokens,
        num_top_prompt_logprobs=None if sampling.prompt_told is None else sampling.prompt_logprobs,
    )


_OFF: Final = RequestSampling()
_Number = TypeVar("_Number", int, float)


def _or(value: _Number | None, otherwise: _Number) -> _Number:
    return otherwise if value is None else value


def is_quick(request: GenerateRequest) -> bool:
    """Whether reading `request` is cheap enough for the event loop; a template's cost is never known."""
    if len(request.generated_token_ids) > QUICK_OUTPUT:
        return False
    return not isinstance(request.prompt, ChatPrompt) and work_of(request.prompt, QUICK_LENGTH) <= QUICK_LENGTH


def _argument(name: str) -> str:
    """An argument of a chat template, as a header may tell it: a name that no variable can have is not repeated."""
    is_variable = name.isascii() and name.isidentifier() and len(name) <= LONGEST_ARGUMENT_NAME
    return f"chat_template_kwargs.{name}" if is_variable else "chat_template_kwargs"
