"""The draw from the whole vocabulary: argmax of logit / temperature + noise, without computing it for every token.

A block of 32 tokens can't beat its largest scaled logit plus its largest noise, and both are cheap to know. The blocks
of the highest bounds are evaluated; when the best score found is not below the next bound, no other token can win.
Otherwise four times as many blocks are looked at, in the end all: the result is always that of the full argmax.
"""

import torch
from torch import Tensor

from stageline_runtime.sampling.noise import BLOCK_SIZE, block_noise_bound, gumbel_noise

FIRST_BLOCKS = 8


def draw_free(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Tokens `[num_rows]` from `logits` `[num_rows, vocab_size]`; `temperatures` `[num_rows]` float64, above 0."""
    logits = _padded(logits)
    highest = logits.view(len(logits), -1, BLOCK_SIZE).amax(dim=-1)
    bounds = highest.to(torch.float64) / temperatures[:, None] + block_noise_bound(keys, highest.shape[1])
    tokens = torch.empty(len(logits), dtype=torch.int64)
    pending = torch.arange(len(logits))
    num_blocks = FIRST_BLOCKS
    while len(pending):
        num_blocks = min(num_blocks, bounds.shape[1])
        drawn, scores = _best_of(logits[pending], temperatures[pending], keys[pending], bounds[pending], num_blocks)
        tokens[pending] = drawn
        open_blocks = (bounds[pending] >= scores[:, None]).sum(dim=-1)
        pending = pending[open_blocks > num_blocks]
        num_blocks *= 4
    return tokens


def _best_of(
    logits: Tensor, temperatures: Tensor, keys: Tensor, bounds: Tensor, num_blocks: int
) -> tuple[Tensor, Tensor]:
    """Best token of the `num_blocks` blocks with the highest bounds, and its score: both `[num_rows]`."""
    blocks = bounds.topk(num_blocks, dim=-1).indices.sort(dim=-1).values
    ids = (blocks[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
    scores = logits.gather(1, ids).to(torch.float64) / temperatures[:, None] + gumbel_noise(keys, ids)
    best, place = scores.max(dim=-1)
    return ids.gather(1, place[:, None]).squeeze(1), best


def _padded(logits: Tensor) -> Tensor:
    """Whole blocks: what is added can't be drawn."""
    missing = -logits.shape[1] % BLOCK_SIZE
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
