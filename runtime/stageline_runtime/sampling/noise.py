"""Noise that depends only on (seed, choice, position, token id), and can be bounded for many tokens at once.

Each token has an exponential value E, independent of all others; `-log E` is its Gumbel noise. The vocabulary is taken
in blocks of 32 ids: a block's smallest E is exponential with rate 32, falls on a uniformly chosen member, and the other
members are that much plus an exponential of their own, since the exponential distribution has no memory. So the joint
distribution is the plain one, yet the best noise of a block costs one hash instead of 32.

A counter-based generator without state: the numbers are hashed to 64 bits by the finaliser of SplitMix64 (Steele, Lea,
Flood 2014), the top 52 bits become a uniform. Torch's int64 multiplication wraps around, as the hash needs.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_SIZE = 32
"""Token ids from `32 * block` on."""
BLOCK_COUNTER = 1 << 40
"""Counters of blocks begin here, far from those of tokens."""
_MASK = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB


class NoiseKey(NamedTuple):
    """What one draw is keyed by. `position` is the position of the token being drawn."""

    seed: int
    choice: int
    position: int


def mixed_keys(keys: list[NoiseKey]) -> Tensor:
    """One int64 of each key, for all keys at once."""
    parts = np.array([(key.seed & _MASK, key.choice, key.position) for key in keys], dtype=np.uint64).reshape(-1, 3)
    state = np.zeros(len(keys), dtype=np.uint64)
    for part in parts.T:
        state = _mix(state + part + np.uint64(INCREMENT))
    return torch.from_numpy(state.view(np.int64))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel values `[num_rows, num_candidates]` float64 for int64 `token_ids` of the same shape."""
    least, place = _block_minimum(keys, token_ids // BLOCK_SIZE)
    own = _exponential(_bits(keys, token_ids))
    return -torch.log(torch.where(token_ids % BLOCK_SIZE == place, least, least + own))


def block_noise_bound(keys: Tensor, num_blocks: int, first: int = 0) -> Tensor:
    """The largest Gumbel value of any token of each block from `first` on, `[num_rows, num_blocks]` float64."""
    blocks = torch.arange(first, first + num_blocks).expand(len(keys), -1)
    return -torch.log(_block_minimum(keys, blocks)[0])


def _block_minimum(keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest exponential of each block, and which member has it; the uniform leaves the hash's low bits unused."""
    bits = _bits(keys, blocks + BLOCK_COUNTER)
    return _exponential(bits) / BLOCK_SIZE, bits & (BLOCK_SIZE - 1)


def _exponential(bits: Tensor) -> Tensor:
    # Half a step is added so that neither 0 nor 1 comes up: 52 bits and the half are exact in float64.
    return -torch.log((_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52)


def _bits(keys: Tensor, counters: Tensor) -> Tensor:
    bits = keys[:, None] + (counters + 1) * _signed(INCREMENT)
    bits = (bits ^ _shift_right(bits, 30)) * _signed(FIRST_MULTIPLIER)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(SECOND_MULTIPLIER)
    return bits ^ _shift_right(bits, 31)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(FIRST_MULTIPLIER)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(SECOND_MULTIPLIER)
    return values ^ (values >> np.uint64(31))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's own copies the sign bit of int64 down."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
