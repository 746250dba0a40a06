"""Engine events as OpenAI's answers: what each of the two APIs writes for one choice. Pure."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stageline_api.engine_http import Admitted, Finished, FinishReason, TokenLogprob, TopLogprob


def token_text(one: TopLogprob) -> str:
    """The token as text; bytes that are no whole character show as U+FFFD, and `bytes` has them exactly."""
    return bytes(one.bytes).decode(errors="replace")


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [_entry(one) | {"top_logprobs": [_entry(other) for other in one.top_logprobs]} for one in tokens]
    return {"content": content, "refusal": None}


def _entry(one: TopLogprob) -> dict[str, Any]:
    return {"token": token_text(one), "logprob": one.logprob, "bytes": list(one.bytes)}


class CompletionLogprobs:
    """`logprobs` of a text completion, whole or in chunks; remembers how far the text has come."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def write(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The lists for the next `tokens`. An offset counts the characters that were whole before the token."""
        tokens = list(tokens)
        return {
            "tokens": [token_text(one) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [_with_sampled(one) for one in tokens],
            "text_offset": [self._offset_of(one) for one in tokens],
        }

    def _offset_of(self, one: TokenLogprob) -> int:
        offset = self._characters
        self._characters += len(self._decoder.decode(bytes(one.bytes)))
        return offset


def _with_sampled(one: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and, as OpenAI always adds it, the sampled one."""
    return {token_text(other): other.logprob for other in one.top_logprobs} | {token_text(one): one.logprob}


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


class AnswerShape(ABC):
    """How one of OpenAI's two APIs writes one choice of an answer."""

    index: int
    chunk_kind: str
    whole_kind: str

    def opening(self) -> dict[str, Any] | None:
        """The choice of the first chunk, before any text; None when the API has no such chunk."""
        return None

    def admitted(self, event: Admitted) -> None:  # noqa: B027 - matters to those that read tool calls only
        """The engine has taken the request."""

    @abstractmethod
    def piece(self, text: str, logprobs: Logprobs) -> dict[str, Any] | None:
        """The choice of a chunk with new text; None when there is nothing to say yet."""

    def held_back(self) -> dict[str, Any] | None:
        """The choice of a chunk with what `piece` kept to itself, before the closing one; None for nothing."""
        return None

    @abstractmethod
    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """The choice of the chunk that says why the answer ended."""

    @abstractmethod
    def whole(self, text: str, logprobs: Logprobs, reason: FinishReason) -> dict[str, Any]:
        """The choice of an answer given at once."""


ShapeOfChoice = Callable[[int], AnswerShape]


@dataclass(slots=True)
class ChatShape(AnswerShape):
    """One choice of `chat.completion` and its chunks."""

    index: int
    chunk_kind: str = "chat.completion.chunk"
    whole_kind: str = "chat.completion"

    def opening(self) -> dict[str, Any] | None:
        return self._choice({"role": "assistant", "content": ""}, None, None)

    def piece(self, text: str, logprobs: Logprobs) -> dict[str, Any] | None:
        return self._choice({"content": text}, logprobs, None)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        return self._choice({}, None, reason.value)

    def whole(self, text: str, logprobs: Logprobs, reason: FinishReason) -> dict[str, Any]:
        choice = self._choice({}, logprobs, reason.value)
        del choice["delta"]
        return choice | {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _choice(self, delta: dict[str, Any], logprobs: Logprobs, reason: str | None) -> dict[str, Any]:
        written = None if logprobs is None else chat_logprobs(logprobs)
        return {"index": self.index, "delta": delta, "logprobs": written, "finish_reason": reason}


@dataclass(slots=True)
class CompletionShape(AnswerShape):
    """One choice of `text_completion`, whole or in chunks."""

    index: int
    chunk_kind: str = "text_completion"
    whole_kind: str = "text_completion"
    _logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)

    def piece(self, text: str, logprobs: Logprobs) -> dict[str, Any]:
        return self._choice(text, logprobs, None)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        return self._choice("", None, reason.value)

    def whole(self, text: str, logprobs: Logprobs, reason: FinishReason) -> dict[str, Any]:
        return self._choice(text, logprobs, reason.value)

    def _choice(self, text: str, logprobs: Logprobs, reason: str | None) -> dict[str, Any]:
        written = None if logprobs is None else self._logprobs.write(logprobs)
        return {"index": self.index, "text": text, "logprobs": written, "finish_reason": reason}
