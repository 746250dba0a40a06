"""OpenAI's requests as engine requests, and engine events as OpenAI's answers. Pure.

Seeds: OpenAI takes any integer, the engine 0 .. 2**63-1; a client's seed keeps its lowest 63 bits (-1 becomes
2**63-1), so equal seeds stay equal. A client that gives none gets one drawn by the caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from stageline_api.engine_http import (
    ChatMessage,
    ChatPrompt,
    Finished,
    FinishReason,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)
from stageline_gateway.logprobs import CompletionLogprobs, chat_logprobs
from stageline_gateway.openai_types import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest

SEED_MASK: Final = 2**63 - 1


def _sampling(request: ChatRequest | CompletionRequest, max_tokens: int | None, drawn_seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
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
        json_schema=request.schema_text,
    )


def chat_to_generate(request: ChatRequest, request_id: str, drawn_seed: int) -> GenerateRequest:
    """The engine's request for a chat. `developer` is OpenAI's newer word for `system`; templates know the older."""
    messages = tuple(
        ChatMessage(role="system" if message.role == "developer" else message.role, content=message.text)
        for message in request.messages
    )
    max_tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    sampling = _sampling(request, max_tokens, drawn_seed)
    return GenerateRequest(request_id=request_id, prompt=ChatPrompt(messages=messages), sampling=sampling)


def completion_to_generate(request: CompletionRequest, request_id: str, drawn_seed: int) -> GenerateRequest:
    """The engine's request for a text completion."""
    prompt: Prompt
    if isinstance(request.prompt, str):
        prompt = TextPrompt(text=request.prompt)
    else:
        prompt = TokenPrompt(token_ids=tuple(request.prompt))
    sampling = _sampling(request, request.max_tokens or DEFAULT_COMPLETION_TOKENS, drawn_seed)
    return GenerateRequest(request_id=request_id, prompt=prompt, sampling=sampling)


def usage(ends: Sequence[Finished]) -> dict[str, int]:
    """OpenAI's token counts, from the ends of all choices: they share one prompt."""
    prompt_tokens = ends[0].prompt_tokens
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An answer or a chunk around `choices`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


Logprobs = Sequence[TokenLogprob] | None
"""Of the tokens in a piece; None when the client didn't ask."""


class AnswerShape(Protocol):
    """How one of OpenAI's two APIs writes one choice of an answer."""

    chunk_kind: str
    whole_kind: str

    def opening(self) -> dict[str, Any] | None:
        """The choice of the first chunk, before any text; None when the API has no such chunk."""

    def piece(self, text: str, logprobs: Logprobs) -> dict[str, Any]:
        """The choice of a chunk with new text."""

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """The choice of the chunk that says why the answer ended."""

    def whole(self, text: str, logprobs: Logprobs, reason: FinishReason) -> dict[str, Any]:
        """The choice of an answer given at once."""


ShapeOfChoice = Callable[[int], AnswerShape]


@dataclass(slots=True)
class ChatShape:
    """One choice of `chat.completion` and its chunks."""

    index: int
    chunk_kind: str = "chat.completion.chunk"
    whole_kind: str = "chat.completion"

    def opening(self) -> dict[str, Any] | None:
        """A chunk that only says who speaks."""
        return self._choice({"role": "assistant", "content": ""}, None, None)

    def piece(self, text: str, logprobs: Logprobs) -> dict[str, Any]:
        """New text."""
        return self._choice({"content": text}, logprobs, None)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """The end."""
        return self._choice({}, None, reason.value)

    def whole(self, text: str, logprobs: Logprobs, reason: FinishReason) -> dict[str, Any]:
        """One message."""
        choice = self._choice({}, logprobs, reason.value)
        del choice["delta"]
        return choice | {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _choice(self, delta: dict[str, str], logprobs: Logprobs, reason: str | None) -> dict[str, Any]:
        written = None if logprobs is None else chat_logprobs(logprobs)
        return {"index": self.index, "delta": delta, "logprobs": written, "finish_reason": reason}


@dataclass(slots=True)
class CompletionShape:
    """One choice of `text_completion`, whole or in chunks."""

    index: int
    chunk_kind: str = "text_completion"
    whole_kind: str = "text_completion"
    _logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)

    def opening(self) -> dict[str, Any] | None:
        """Text completions open with their first text."""
        return None

    def piece(self, text: str, logprobs: Logprobs) -> dict[str, Any]:
        """New text."""
        return self._choice(text, logprobs, None)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """The end."""
        return self._choice("", None, reason.value)

    def whole(self, text: str, logprobs: Logprobs, reason: FinishReason) -> dict[str, Any]:
        """All the text."""
        return self._choice(text, logprobs, reason.value)

    def _choice(self, text: str, logprobs: Logprobs, reason: str | None) -> dict[str, Any]:
        written = None if logprobs is None else self._logprobs.write(logprobs)
        return {"index": self.index, "text": text, "logprobs": written, "finish_reason": reason}
