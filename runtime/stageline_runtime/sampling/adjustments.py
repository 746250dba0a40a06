"""Changes to one row's logits before the draw: logit bias, then repetition, frequency and presence penalty.

Repetition penalty (Keskar et al. 2019, section 4.1) divides a positive logit of any token of prompt or output and
multiplies a negative one. Frequency and presence penalty follow OpenAI's definition and count output alone:
`logit - count * frequency - (count > 0) * presence`. All of it happens before temperature, so greedy rows feel it too.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import RequestSampling

_FIRST_CAPACITY = 64
Placing = Callable[[Tensor], Tensor]
"""Brings a small tensor from the host to where the logits are."""


def stay(tensor: Tensor) -> Tensor:
    """For logits on the host: nothing to bring."""
    return tensor


class SeenTokens:
    """Which tokens a request holds already, and how often it has generated each: what penalties are computed from.

    Kept as the distinct ids and their counts, so that a penalty touches those ids only and never the whole vocabulary;
    adding a token takes constant time. The border between prompt and output is the caller's: a token counts as output
    only through `add_output`.
    """

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = torch.zeros(_FIRST_CAPACITY, dtype=torch.int64)
        self._output_counts = torch.zeros(_FIRST_CAPACITY, dtype=torch.float32)

    @property
    def ids(self) -> Tensor:
        """Distinct token ids of prompt and output `[num_distinct]` int64, in order of appearance."""
        return self._ids[: len(self._place)]

    @property
    def output_counts(self) -> Tensor:
        """How often each of `ids` has been generated `[num_distinct]` float32; 0 for prompt tokens."""
        return self._output_counts[: len(self._place)]

    def add_prompt(self, token_ids: Iterable[int]) -> None:
        """Take prompt tokens, which repetition penalty counts and the others don't."""
        for token in token_ids:
            self._place_of(token)

    def add_output(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            place = self._place_of(token)  # may put larger tensors in place
            self._output_counts[place] += 1.0

    def _place_of(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
                self._output_counts = torch.cat((self._output_counts, torch.zeros_like(self._output_counts)))
            self._ids[place] = token
        return place


def adjust(logits: Tensor, sampling: RequestSampling, seen: SeenTokens | None, place: Placing = stay) -> None:
    """Change `logits` `[vocab_size]` float32 in place. `seen` may be None when `sampling.has_penalties` is false."""
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        logits[place(torch.tensor(ids))] += place(torch.tensor(values, dtype=torch.float32))
    if seen is None:
        return
    seen_ids, output_counts = place(seen.ids), place(seen.output_counts)
    values_of_seen = logits[seen_ids]
    if (penalty := sampling.repetition_penalty) != 1.0:
        values_of_seen = (values_of_seen / penalty).where(values_of_seen > 0, values_of_seen * penalty)
    values_of_seen -= output_counts * sampling.frequency_penalty
    values_of_seen -= (output_counts > 0) * sampling.presence_penalty
    logits[seen_ids] = values_of_seen
