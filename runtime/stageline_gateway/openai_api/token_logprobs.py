"""Log probabilities of tokens as OpenAI's two APIs write them, and those of prompts as vLLM does. Pure."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from stageline_api.engine_http import PromptToken, TokenLogprob, TopLogprob


def token_text(one: TopLogprob | PromptToken) -> str:
    """The token as text; bytes that are no whole character show as U+FFFD, and `bytes` has them exactly."""
    return bytes(one.bytes).decode(errors="replace")


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = [_entry(one) | {"top_logprobs": [_entry(other) for other in one.top_logprobs]} for one in tokens]
    return {"content": content, "refusal": None}


def _entry(one: TopLogprob) -> dict[str, Any]:
    return {"token": token_text(one), "logprob": one.logprob, "bytes": list(one.bytes)}


def prompt_entry(one: PromptToken, count: int) -> dict[str, Any] | None:
    """One of vLLM's `prompt_logprobs`: the token and the `count` likeliest, by their ids; null for the first token."""
    if one.logprob is None:
        return None
    own = {str(one.token_id): _ranked(one, one.logprob, one.rank)}
    likeliest = enumerate(one.top_logprobs[:count], start=1)
    return own | {str(other.token_id): _ranked(other, other.logprob, rank) for rank, other in likeliest}


def _ranked(one: TopLogprob | PromptToken, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token_text(one)}


def _name(one: TopLogprob | PromptToken) -> str:
    """What a text completion calls a token: its text, or as OpenAI writes bytes that are no whole character.

    Alternatives are told apart by it: with U+FFFD one half of a character would stand for all.
    """
    try:
        return bytes(one.bytes).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.bytes)


class CompletionLogprobs:
    """`logprobs` of a text completion, whole or in chunks; remembers how far the text has come."""

    def __init__(self, echo: str = "") -> None:
        """`echo`: the prompt's text as the client wrote it, where the answer begins with it."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._echo = echo
        self._characters = 0

    def write(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The lists for the next `tokens`. An offset counts the characters that were whole before the token."""
        tokens = list(tokens)
        self._characters = max(self._characters, len(self._echo))
        return {
            "tokens": [_name(one) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [_named(_name(one), one.logprob, one.top_logprobs) for one in tokens],
            "text_offset": [self._pass(one)[0] for one in tokens],
        }

    def write_prompt(self, tokens: Sequence[PromptToken], count: int) -> dict[str, Any]:
        """The same for tokens of an echoed prompt, with `count` alternatives each; null stands for the first one's.

        A first word whose blank the text lacks is named without it, so that each name stands at its offset.
        """
        places = [self._pass(one) for one in tokens]
        names = [
            _name(one).removeprefix(" " if lacks_blank else "")
            for one, (_, lacks_blank) in zip(tokens, places, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [
                None if one.logprob is None else _named(name, one.logprob, one.top_logprobs[:count])
                for name, one in zip(names, tokens, strict=True)
            ],
            "text_offset": [offset for offset, _ in places],
        }

    def _pass(self, one: TokenLogprob | PromptToken) -> tuple[int, bool]:
        """Where the token begins in the text, and whether the text lacks its blank; the next one begins behind it."""
        offset = self._characters
        text = self._decoder.decode(bytes(one.bytes))
        shown = self._shown(text)
        self._characters += shown
        return offset, text.startswith(" ") and shown == len(text) - 1

    def _shown(self, text: str) -> int:
        """How many characters of a token the text has: none of one that a tokenizer put before an echoed prompt, and
        not the blank that it put before the prompt's first word.
        """
        at = self._characters
        if at >= len(self._echo) or self._echo.startswith(text, at):
            return len(text)
        bare = text.removeprefix(" ")
        return len(bare) if self._echo.startswith(bare, at) else 0


def _named(name: str, logprob: float, likeliest: Iterable[TopLogprob]) -> dict[str, float]:
    """The likeliest tokens and, as OpenAI always adds it, the token itself."""
    return {_name(other): other.logprob for other in likeliest} | {name: logprob}
