"""What is kept of a whole answer until it is sent: its text, and its log probabilities as the JSON that will be sent.

Twenty alternatives a token are 14 KiB as objects and a tenth of that as JSON; they become JSON as they come. All of it
counts in the room of open requests, so an answer that outgrows it is refused, and a gateway isn't ended by its sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from stageline_api.engine_http import Delta, FinishReason, PromptTokens
from stageline_gateway.endpoints.json_answers import encode_json
from stageline_gateway.openai_api.answer_shapes import AnswerShape

PIECE_BYTES: Final = 80
"""What one more string costs beyond its characters."""


@dataclass(slots=True)
class KeptChoice:
    """One choice. `take` says what more it holds."""

    shape: AnswerShape
    with_logprobs: bool
    _texts: list[str] = field(default_factory=list)
    _lists: dict[str, list[bytes]] = field(default_factory=dict)
    """Items of each list of the log probabilities, as JSON without brackets."""
    _rest: dict[str, Any] = field(default_factory=dict)
    _prompt: list[bytes] = field(default_factory=list)
    """Items of the prompt's log probabilities, likewise."""

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, delta: Delta) -> int:
        """Keep a piece of the answer; returns the bytes that it holds."""
        held_bytes = 0
        if delta.text:
            self._texts.append(delta.text)
            held_bytes += 4 * len(delta.text) + PIECE_BYTES
        if self.with_logprobs and delta.logprobs:
            for name, value in self.shape.logprobs(delta.logprobs).items():
                held_bytes += self._keep(name, value)
        return held_bytes

    def take_prompt(self, event: PromptTokens) -> int:
        """Keep what the answer says of tokens of its prompt; returns the bytes that it holds."""
        words = self.shape.prompt(event.tokens)
        held_bytes = 0 if words.chunk is None else 4 * len(words.chunk["text"])
        for name, value in words.logprobs.items():
            held_bytes += self._keep(name, value)
        if words.entries:
            self._prompt.append(encode_json(words.entries)[1:-1])
            held_bytes += len(self._prompt[-1]) + PIECE_BYTES
        return held_bytes

    def written(self, reason: FinishReason) -> tuple[dict[str, Any], dict[str, Any]]:
        """All that is kept: the choice, and fields of the answer itself if this is its first choice."""
        choice = self.shape.whole(self.text, reason)
        if self.with_logprobs:
            for name, value in self.shape.logprobs(()).items():
                self._keep(name, value)
            choice |= {"logprobs": self._rest | {name: _list_of(items) for name, items in self._lists.items()}}
        if self.shape.prompt_logprobs is None:
            return choice, {}
        told = {"prompt_logprobs": _list_of(self._prompt)}
        return (choice, told) if self.shape.tells_prompt_at_top else (choice | told, {})

    def _keep(self, name: str, value: Any) -> int:
        if not isinstance(value, list):
            self._rest[name] = value
            return 0
        kept = self._lists.setdefault(name, [])
        if value:
            kept.append(encode_json(value)[1:-1])
        return len(kept[-1]) + PIECE_BYTES if value else 0


def _list_of(items: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(items) + b"]")
