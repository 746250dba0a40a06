"""Which tokens top-k, top-p and min-p leave, on a device: found by bisection, without a sort and without waiting.

The rules are those of `truncation`. A row's candidates end at some logit; which one is found by halving the range of
float32 as often as it has bits, so that the work is the same for every row and no step depends on a value that was
computed. Of equal logits at the end the first ones by token id are kept. Five numbers are held for each entry of the
vocabulary, 25 bytes, where a sort needs more than twice as much.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stageline_runtime.sampling.truncation import Truncation

BYTES_PER_ENTRY = 25
"""Of device memory at once for each entry of the vocabulary of a restricted row: key 4, weight 8, masses 8, masks 5."""
_KEY_BITS = 32


@dataclass(frozen=True, slots=True)
class _End:
    """Where the candidates of each row end: `[num_rows]` each."""

    key: Tensor
    """Of the last logit of which a token is kept; those above it are all kept."""
    num_equal: Tensor
    """How many tokens of that logit are kept, int64."""


def kept_tokens(logits: Tensor, truncation: Truncation) -> Tensor:
    """Mask of the tokens that are left, of the same shape as float32 `logits`, `[num_rows, vocab_size]`."""
    keys = _ordered_keys(logits)
    highest = logits.amax(dim=-1, keepdim=True).to(torch.float64)
    weights = logits.to(torch.float64).sub_(highest).div_(truncation.temperature[:, None]).exp_()
    is_kept = (weights >= truncation.min_p[:, None]) & (logits > float("-inf"))
    top_k = _end_of_top_k(keys, truncation.top_k)
    is_kept &= _until(keys, top_k)
    top_p = _end_of_top_p(keys, weights, top_k, truncation.top_p)
    return is_kept & (_until(keys, top_p) | (truncation.top_p >= 1.0)[:, None])


def _ordered_keys(logits: Tensor) -> Tensor:
    """int32 in the order of the floats; both zeros are one."""
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _until(keys: Tensor, end: _End) -> Tensor:
    is_equal = keys == end.key[:, None]
    return (keys > end.key[:, None]) | (
        is_equal & (is_equal.cumsum(dim=-1, dtype=torch.int32) <= end.num_equal[:, None])
    )


def _end_of_top_k(keys: Tensor, top_k: Tensor) -> _End:
    low, high = _range(keys)
    for _ in range(_KEY_BITS):
        middle = _halfway(low, high)
        is_enough = (keys > middle[:, None]).sum(dim=-1) < top_k
        low, high = torch.where(is_enough, low, middle + 1), torch.where(is_enough, middle, high)
    return _End(key=low, num_equal=top_k - (keys > low[:, None]).sum(dim=-1))


def _end_of_top_p(keys: Tensor, weights: Tensor, top_k: _End, share: Tensor) -> _End:
    """The first logit, best first, with whose tokens the mass reaches `share` of what top-k keeps."""
    total = _mass_above(keys, weights, top_k.key) + top_k.num_equal * _weight_at(keys, weights, top_k.key)
    wanted = share * total
    low, high = _range(keys)
    for _ in range(_KEY_BITS):
        middle = _halfway(low, high)
        is_short = _mass_above(keys, weights, middle) < wanted
        low, high = torch.where(is_short, low, middle + 1), torch.where(is_short, middle, high)
    missing = wanted - _mass_above(keys, weights, low)
    num_equal = torch.ceil(missing / _weight_at(keys, weights, low)).nan_to_num(nan=1.0, posinf=1.0)
    return _End(key=low, num_equal=num_equal.clamp(min=1.0, max=float(keys.shape[1])).to(torch.int64))


def _range(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Everything that a key may be, int64 so that sums of two don't overflow."""
    limits = torch.iinfo(torch.int32)
    low = torch.full((len(keys),), limits.min, dtype=torch.int64, device=keys.device)
    return low, torch.full_like(low, limits.max)


def _halfway(low: Tensor, high: Tensor) -> Tensor:
    return (low + high) >> 1


def _mass_above(keys: Tensor, weights: Tensor, key: Tensor) -> Tensor:
    return weights.masked_fill(keys <= key[:, None], 0.0).sum(dim=-1)


def _weight_at(keys: Tensor, weights: Tensor, key: Tensor) -> Tensor:
    return weights.masked_fill(keys != key[:, None], 0.0).amax(dim=-1)
