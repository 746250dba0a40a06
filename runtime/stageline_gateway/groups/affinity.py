"""Which groups a request prefers: those that its session, or the beginning of its prompt, has been to before. Pure.

Rendezvous hashing: each group gets a score from (key, group), and the best score wins. All gateway replicas agree on it
without talking to each other, and a group that leaves or comes moves its own keys only. A group that carries far more
than its share is passed over for the next in the order (a bounded load), so that one popular prompt can't bury it.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, assert_never

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import ChatPrompt, Prompt, TextPrompt, TokenPrompt

SESSION_HEADER: Final = "x-session-id"
"""Requests with the same value go to the same group while it can take them."""
PREFIX_CHARACTERS: Final = 256
PREFIX_TOKENS: Final = 64
"""Prompts that are shorter have no preference: what they share is quicker computed again than it is to crowd."""
LOAD_FACTOR: Final = 1.25
LOAD_SLACK_TOKENS: Final = 4096
"""How far above `LOAD_FACTOR` times the mean a group may be loaded: a few requests aren't a crowd."""


def ranked(key: str, groups: Iterable[GroupEndpoint]) -> list[GroupEndpoint]:
    """`groups` in the order in which `key` prefers them. A group's next incarnation keeps its place."""

    def score(group: GroupEndpoint) -> bytes:
        return blake2b(f"{group.model}\0{group.group}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()

    return sorted(groups, key=score, reverse=True)


def within_bound(load_tokens: int, mean_tokens: float) -> bool:
    """Whether a group with so many tokens outstanding may be preferred to one with fewer."""
    return load_tokens <= LOAD_FACTOR * mean_tokens + LOAD_SLACK_TOKENS


def affinity_key(prompt: Prompt, session: str = "") -> str:
    """What the preference hangs on: the session if there is one, else the prompt's beginning; empty for neither."""
    if session:
        return f"session:{session}"
    match prompt:
        case TokenPrompt(token_ids=token_ids):
            is_long = len(token_ids) >= PREFIX_TOKENS
            return "tokens:" + ",".join(map(str, token_ids[:PREFIX_TOKENS])) if is_long else ""
        case TextPrompt(text=text):
            return f"text:{text[:PREFIX_CHARACTERS]}" if len(text) >= PREFIX_CHARACTERS else ""
        case ChatPrompt():
            beginning = _beginning(prompt)
            return f"chat:{beginning}" if len(beginning) >= PREFIX_CHARACTERS else ""
        case _:
            assert_never(prompt)


def _beginning(prompt: ChatPrompt) -> str:
    beginning = ""
    for message in prompt.messages:
        beginning += f"{message.role}\0{message.content}\0"
        if len(beginning) >= PREFIX_CHARACTERS:
            break
    return beginning[:PREFIX_CHARACTERS]
