"""Tokens that a request may not draw next: ends of the answer before its least length, all but those allowed, and what
would complete a banned word.

An excluded token's logit becomes minus infinity, after bias, penalties and grammar: nothing lifts it again. The engine
admits no request whose exclusions could leave nothing to draw. `Tail` holds what the banned words need of the output,
which is all of the history that counts here.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.adjustments import Placing, stay


class Tail:
    """The newest tokens of one output, as many as the longest banned word of several tokens has before its last."""

    def __init__(self, bad_words: Iterable[tuple[int, ...]]) -> None:
        self._bad_words = [word for word in bad_words if len(word) > 1]
        self._length = max(map(len, self._bad_words), default=1) - 1
        self._newest: list[int] = []

    def add(self, token_ids: Iterable[int]) -> None:
        """Take output tokens, in order."""
        newest = [*self._newest, *token_ids]
        self._newest = newest[max(len(newest) - self._length, 0) :]

    def completing(self) -> Iterator[int]:
        """Tokens that would complete a banned word now."""
        for *beginning, last in self._bad_words:
            if self._newest[-len(beginning) :] == beginning:
                yield last


def exclude(
    logits: Tensor, sampling: RequestSampling, position: int, tail: Tail | None = None, place: Placing = stay
) -> None:
    """Exclude tokens from `logits` `[vocab_size]` float32, in place, before the token at `position` is drawn.

    `tail` may be None when no banned word has several tokens.
    """
    if sampling.allowed_token_ids:
        allowed = place(torch.tensor(sampling.allowed_token_ids))
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept
    excluded = [word[0] for word in sampling.bad_words if len(word) == 1]
    if position - sampling.num_prompt_tokens < sampling.min_tokens:
        excluded += sampling.end_token_ids
    if tail is not None:
        excluded += tail.completing()
    if excluded:
        logits[place(torch.tensor(excluded))] = float("-inf")
