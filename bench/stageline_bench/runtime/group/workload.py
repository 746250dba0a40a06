"""An engine's workload: prompts as token ids, drawn from a seed, so that every engine gets the same ones."""

import random
from dataclasses import dataclass, replace

LOWEST_TOKEN_ID = 100
"""Ids below are special tokens in the vocabularies used here."""

INPUT_TOKENS = 32
"""Default prompt length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`requests` prompts of `input_tokens`, each continued by exactly `output_tokens`."""

    name: str
    requests: int
    input_tokens: int = INPUT_TOKENS
    output_tokens: int = 96
    seed: int = 0
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every prompt; they depend only on the seed and the sizes."""
        draw = random.Random(f"{self.seed}/{self.requests}/{self.input_tokens}")
        lowest = min(LOWEST_TOKEN_ID, vocab_size - 1)
        return [[draw.randrange(lowest, vocab_size) for _ in range(self.input_tokens)] for _ in range(self.requests)]

    def with_seed(self, seed: int) -> "Workload":
        """The same sizes, other prompts."""
        return replace(self, seed=seed)

    @property
    def total_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return self.requests * self.output_tokens
