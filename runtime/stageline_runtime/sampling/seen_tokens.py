"""Which tokens a request holds already, and how often it has generated each: what penalties are computed from.

Kept as the distinct ids and their counts, so that a penalty touches those ids only and never the whole vocabulary.
The border between prompt and output is the caller's: a token counts as output only through `add_output`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_FIRST_CAPACITY = 64


class SeenTokens:
    """Distinct tokens of one request. Adding a token takes constant time."""

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
