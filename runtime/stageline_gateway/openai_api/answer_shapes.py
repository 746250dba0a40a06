"""Engine events as OpenAI's answers: what each of the two APIs writes, and how others do. Pure."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from stageline_api.engine_http import Admitted, Finished, FinishReason, PromptToken, TokenLogprob
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.thoughts import ThoughtReader
from stageline_gateway.openai_api.token_logprobs import CompletionLogprobs, chat_logprobs, prompt_entry


def usage(ends: Sequence[Finished], num_prompts: int = 1) -> dict[str, Any]:
    """OpenAI's token counts, from the ends of all choices in their order: as many for each prompt.

    Of a prompt's tokens, those count as cached that the engine need not compute for the choice that found the most.
    """
    each = len(ends) // num_prompts
    prompt_tokens = sum(end.prompt_tokens for end in ends[::each])
    cached = [max(end.cached_tokens for end in ends[at : at + each]) for at in range(0, len(ends), each)]
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
    }


class Stamp(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class PromptWords:
    """What an answer says of some of its prompt's tokens."""

    entries: tuple[dict[str, Any] | None, ...] = ()
    """Of `prompt_logprobs`, where they were asked for."""
    logprobs: dict[str, Any] = field(default_factory=dict)
    """Lists of `logprobs`, which begin with the prompt's where that is echoed."""
    chunk: dict[str, Any] | None = None
    """The choice of the chunk that echoes them; None where nothing is to be said in a stream."""


class AnswerShape(ABC):
    """How one of OpenAI's two APIs writes one choice of an answer."""

    index: int
    chunk_kind: str
    whole_kind: str
    tells_prompt_at_top: bool
    """Whether a whole answer has `prompt_logprobs` beside its choices, from the first of them, and not in each."""
    prompt_logprobs: int | None
    """How many of the likeliest tokens to list with each of the prompt's; None for no `prompt_logprobs`."""

    def opening(self) -> dict[str, Any] | None:
        """The choice of the first chunk, before any text; None when the API has no such chunk."""
        return None

    def admitted(self, event: Admitted) -> None:  # noqa: B027 - matters to those that read tool calls only
        """The engine has taken the request."""

    def prompt(self, tokens: Sequence[PromptToken]) -> PromptWords:  # noqa: ARG002 - for those that tell it
        """What the answer says of the next tokens of the prompt."""
        return PromptWords()

    @abstractmethod
    def piece(self, text: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        """The choices of chunks with new text, in order; none when there is nothing to say yet."""

    def held_back(self, reason: FinishReason) -> list[dict[str, Any]]:  # noqa: ARG002 - for those that read calls
        """The choices of chunks with what `piece` kept to itself, before the closing one."""
        return []

    @abstractmethod
    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """The choice of the chunk that says why the answer ended."""

    @abstractmethod
    def whole(self, text: str, reason: FinishReason) -> dict[str, Any]:
        """The choice of an answer given at once, without its log probabilities."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log probabilities of the next `tokens` as this API writes them; their lists go on from piece to piece."""


ShapeOfChoice = Callable[[int], AnswerShape]


@dataclass(slots=True)
class ChatShape(AnswerShape):
    """One choice of `chat.completion` and its chunks."""

    index: int
    chunk_kind: str = "chat.completion.chunk"
    whole_kind: str = "chat.completion"
    tells_prompt_at_top: bool = True
    prompt_logprobs: int | None = None
    goes_on: bool = False
    """Whether the answer goes on with words of the client's own, so that a thought may be in its middle."""
    _thoughts: ThoughtReader | None = None

    def admitted(self, event: Admitted) -> None:
        self._thoughts = None if event.thoughts is None else ThoughtReader(event.thoughts, self.goes_on)

    def opening(self) -> dict[str, Any] | None:
        return self._choice({"role": "assistant", "content": ""}, None, None)

    def prompt(self, tokens: Sequence[PromptToken]) -> PromptWords:
        return PromptWords(_entries(tokens, self.prompt_logprobs))

    def piece(self, text: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        if self._thoughts is None:
            return [self._choice({"content": text}, logprobs, None)]
        return self._split(self._thoughts.push(text), logprobs)

    def held_back(self, reason: FinishReason) -> list[dict[str, Any]]:  # noqa: ARG002 - as above
        return [] if self._thoughts is None else self._split(self._thoughts.finish(), None)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        return self._choice({}, None, reason.value)

    def whole(self, text: str, reason: FinishReason) -> dict[str, Any]:
        choice = self._choice({}, None, reason.value)
        del choice["delta"]
        thought, content = self._split_whole(text)
        return choice | {"message": {"role": "assistant", "content": content, "refusal": None} | thought}

    def _split_whole(self, text: str) -> tuple[dict[str, Any], str]:
        """The fields that a message has for its thoughts, and what of `text` is the answer."""
        if self._thoughts is None:
            return {}, text
        parts = [self._thoughts.push(text), self._thoughts.finish()]
        thought = "".join(part for part, _ in parts)
        return {"reasoning_content": thought} if thought else {}, "".join(part for _, part in parts)

    def _split(self, parts: tuple[str, str], logprobs: Logprobs) -> list[dict[str, Any]]:
        """The choice of a chunk with new thoughts and new text; none for neither."""
        named = zip(("reasoning_content", "content"), parts, strict=True)
        delta = {name: part for name, part in named if part}
        return [self._choice(delta, logprobs, None)] if delta or logprobs else []

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(tokens)

    def _choice(self, delta: dict[str, Any], logprobs: Logprobs, reason: str | None) -> dict[str, Any]:
        written = None if logprobs is None else chat_logprobs(logprobs)
        return {"index": self.index, "delta": delta, "logprobs": written, "finish_reason": reason}


@dataclass(slots=True)
class CompletionShape(AnswerShape):
    """One choice of `text_completion`, whole or in chunks."""

    index: int
    chunk_kind: str = "text_completion"
    whole_kind: str = "text_completion"
    tells_prompt_at_top: bool = False
    prompt_logprobs: int | None = None
    echo: str | None = None
    """The prompt's text, where the answer is to begin with it; empty where only its tokens tell it."""
    top_logprobs: int | None = None
    """How many of the likeliest tokens to list with each one of an echo."""
    _logprobs: CompletionLogprobs | None = None
    """Made when there are some to write, as is the decoder when there are bytes: few requests have either."""
    _decoder: codecs.IncrementalDecoder | None = None
    _echoed: str = ""
    """Of a prompt of ids, the text so far."""

    def opening(self) -> dict[str, Any] | None:
        return self._choice(self.echo, None, None) if self.echo else None

    def prompt(self, tokens: Sequence[PromptToken]) -> PromptWords:
        entries = _entries(tokens, self.prompt_logprobs)
        if self.echo is None:
            return PromptWords(entries)
        text = "" if self.echo else self._decoded(b"".join(bytes(one.bytes) for one in tokens))
        self._echoed += text
        count = self.top_logprobs
        logprobs = {} if count is None else self._lists().write_prompt(tokens, count)
        choice = self._choice(text, None, None) | ({"logprobs": logprobs} if logprobs else {})
        return PromptWords(entries, logprobs, choice if text or logprobs else None)

    def piece(self, text: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        return [self._choice(text, logprobs, None)]

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        return self._choice("", None, reason.value)

    def whole(self, text: str, reason: FinishReason) -> dict[str, Any]:
        return self._choice((self.echo or self._echoed) + text, None, reason.value)

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._lists().write(tokens)

    def _lists(self) -> CompletionLogprobs:
        if self._logprobs is None:
            self._logprobs = CompletionLogprobs(self.echo or "")
        return self._logprobs

    def _decoded(self, told: bytes) -> str:
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return self._decoder.decode(told)

    def _choice(self, text: str, logprobs: Logprobs, reason: str | None) -> dict[str, Any]:
        written = None if logprobs is None else self._lists().write(logprobs)
        return {"index": self.index, "text": text, "logprobs": written, "finish_reason": reason}


def _entries(tokens: Sequence[PromptToken], count: int | None) -> tuple[dict[str, Any] | None, ...]:
    return () if count is None else tuple(prompt_entry(one, count) for one in tokens)


Event = dict[str, Any]
"""A JSON object whose `type` is also its name in the stream."""


class Dialect(ABC):
    """What another API makes of a chat's answer: its own events while it comes, or its own object at the end.

    It is told the deltas of one choice of a chat, as OpenAI's chunks have them, and keeps what the end repeats.
    """

    ping: ClassVar[Event | None] = None
    """The event that keeps a silent stream open, where the API has one."""
    id_header: ClassVar[str] = "x-request-id"
    """What the API calls the header of an answer's id; it is there beside the others' name for it."""

    @abstractmethod
    def begin(self, prompt_tokens: int) -> list[Event]:
        """The request was admitted."""

    @abstractmethod
    def take(self, delta: dict[str, Any]) -> list[Event]:
        """More of the answer: `reasoning_content`, then `content`, then `tool_calls`."""

    @abstractmethod
    def end(self, reason: str, counts: dict[str, Any], stop_string: str | None) -> list[Event]:
        """The answer's end: OpenAI's finish reason and token counts, those spent on thoughts among them, and which of
        the request's stop strings ended it."""

    @abstractmethod
    def failed(self, error: ApiError) -> list[Event]:
        """The end of an answer that had begun and can't go on."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer at once, after its end."""
