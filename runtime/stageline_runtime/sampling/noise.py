"""Noise that depends only on (seed, choice, position, token id).

A counter-based generator: the four numbers are hashed to 64 bits, the top 53 become a uniform, the uniform a Gumbel
value. There is no state, so the noise is the same for any batch, pipeline depth, restart or number of candidates
looked at. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied once per input. Torch's int64
multiplication wraps around, as the hash needs.
"""

from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
_SECOND_MULTIPLIER = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """What one draw is keyed by. `position` is the position of the token being drawn."""

    seed: int
    choice: int
    position: int


def gumbel_noise(keys: list[NoiseKey], token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel values `[num_rows, num_candidates]` float64 for int64 `token_ids` of the same shape."""
    mixed_keys = torch.tensor([_signed(_mix_key(key)) for key in keys], dtype=torch.int64)
    counters = (token_ids + 1) * _signed(_INCREMENT)
    bits = _mix(mixed_keys[:, None] + counters)
    # Half a step is added so that neither 0 nor 1 comes up and both logarithms are finite.
    uniform = (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix_key(key: NoiseKey) -> int:
    state = 0
    for part in (key.seed, key.choice, key.position):
        state = _mix_int((state + part + _INCREMENT) & _MASK)
    return state


def _mix_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST_MULTIPLIER) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND_MULTIPLIER) & _MASK
    return value ^ (value >> 31)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _signed(_FIRST_MULTIPLIER)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(_SECOND_MULTIPLIER)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift: torch's own copies the sign bit of int64 down."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
