"""The score that a sampled token won by: its log probability over the temperature, plus its noise.

Float32 rounds differently in another batch, so where two answers part, a token may have taken another's place whose
score lies within `NEAR_TIE` of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from oracles.tiny_models import SPECIAL_TOKENS
from stageline_runtime.sampling.noise import NoiseKey, gumbel_noise, mixed_keys

NEAR_TIE: Final = 1e-4


def ids_by_bytes(model: Path) -> dict[tuple[int, ...], int]:
    """Token ids of a tiny model by the bytes they stand for; no two stand for the same."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found: dict[tuple[int, ...], int] = {}
    for token, index in tokenizer.get_vocab().items():
        raw = token.encode() if token in SPECIAL_TOKENS else bytes(_byte_of()[character] for character in token)
        found[tuple(raw)] = index
    assert len(found) == tokenizer.get_vocab_size()
    return found


def score(logprob: float, temperature: float, seed: int, position: int, token_id: int, choice: int = 0) -> float:
    """What the sampler compares when nothing is cut off; at temperature 0 the log probability alone."""
    if temperature == 0:
        return logprob
    noise = gumbel_noise(mixed_keys([NoiseKey(seed, choice, position)]), torch.tensor([[token_id]]))
    return logprob / temperature + float(noise)


@dataclass(frozen=True, slots=True)
class Parting:
    """The place at which two answers to one request have different tokens."""

    temperature: float
    seed: int
    position: int
    """Of the tokens in the sequence, prompt included."""
    choice: int = 0

    def is_near_tie(self, ids: Mapping[tuple[int, ...], int], *tokens: tuple[tuple[int, ...], float]) -> bool:
        """Whether the two tokens, each its bytes and its log probability, scored alike."""
        one, other = (
            score(logprob, self.temperature, self.seed, self.position, ids[token], self.choice)
            for token, logprob in tokens
        )
        return abs(one - other) <= NEAR_TIE


def _byte_of() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
