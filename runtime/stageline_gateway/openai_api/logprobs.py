"""The engine's log probabilities in OpenAI's two forms: `logprobs.content` of chats, parallel lists of completions."""

import codecs
from collections.abc import Iterable
from typing import Any

from stageline_api.engine_http import TokenLogprob, TopLogprob


def token_text(one: TopLogprob) -> str:
    """The token as text; bytes that are no whole character show as U+FFFD, and `bytes` has them exactly."""
    return bytes(one.bytes).decode(errors="replace")


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat choice or chunk."""
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
