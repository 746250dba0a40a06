"""Draws one token per row: greedy, or temperature, top-k, top-p, min-p and keyed Gumbel noise, in this order.

The token is the kept candidate with the largest logit / temperature + noise, which is a draw from the softmax of what
is kept (Gumbel-max). A truncated row is tried on its best 256 candidates; where these don't settle it, by drawing from
the whole vocabulary until the token is one that is kept (it is then the best of the kept ones too); what is left open
is sorted in full. So the result is always that of a full sort. A row's token depends on nothing but its logits and
parameters, never on its batch.
"""

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.noise import BLOCK_SIZE, NoiseKey, block_noise_bound, gumbel_noise, mixed_keys
from stageline_runtime.sampling.truncation import Truncation, judge_tokens, kept_candidates, ordered_candidates

PREFILTER_SIZE = 256
MAX_ELIMINATIONS = 8
FIRST_BLOCKS = 8


def sample(logits: Tensor, rows: list[RequestSampling], positions: list[int]) -> Tensor:
    """Draw tokens `[num_rows]` int64 from float32 `logits` `[num_rows, vocab_size]`, each at its request's position."""
    sampled = [index for index, row in enumerate(rows) if row.temperature > 0.0]
    if len(sampled) == len(rows):
        return _sample_rows(logits, rows, positions) if rows else torch.empty(0, dtype=torch.int64)
    tokens = best_tokens(logits)
    if sampled:
        chosen, places = [rows[index] for index in sampled], [positions[index] for index in sampled]
        tokens[sampled] = _sample_rows(logits[sampled], chosen, places)
    return tokens


def best_tokens(logits: Tensor) -> Tensor:
    """The largest logit of each row, of equal ones the first: `[num_rows]` int64. By numpy, which compares sixteen at
    once where torch compares one: a tenth of the time.
    """
    best: Tensor = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return best


def _sample_rows(logits: Tensor, rows: list[RequestSampling], positions: list[int]) -> Tensor:
    """Rows with a temperature: unrestricted ones need no order at all, the others try the cheap ways first."""
    vocab_size = logits.shape[1]
    keys = mixed_keys(noise_keys(rows, positions))
    truncation = truncation_of(rows, vocab_size)
    tokens = torch.empty(len(rows), dtype=torch.int64)
    are_free = torch.tensor([is_free(row, vocab_size) for row in rows])
    free, restricted = are_free.nonzero().squeeze(1), (~are_free).nonzero().squeeze(1)
    if len(free):
        tokens[free] = best_free(logits[free], truncation.temperature[free], keys[free])[0]
    for attempt in (_draw_prefiltered, _draw_by_elimination, draw_sorted):
        if not len(restricted):
            break
        drawn, settled = attempt(logits[restricted], keys[restricted], truncation.rows(restricted))
        tokens[restricted] = drawn
        restricted = restricted[~settled]
    return tokens


def _draw_prefiltered(logits: Tensor, keys: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """Tokens drawn among the best candidates, and whether these settle each row: both `[num_rows]`."""
    size = min(PREFILTER_SIZE, logits.shape[1])
    tokens, settled = _draw_among(logits, keys, truncation, size)
    # The mass of a top-k that reaches past the candidates is not known.
    return tokens, settled & ~((truncation.top_k > size) & (truncation.top_k < logits.shape[1]))


def _draw_by_elimination(logits: Tensor, keys: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """Draw from the whole vocabulary; what comes after a token that is dropped is dropped too, so draw again without.

    Settled when a round's token is surely kept. Rows with a top-k, or too close to a border, are left open.
    """
    tokens = torch.zeros(len(logits), dtype=torch.int64)
    settled = torch.zeros(len(logits), dtype=torch.bool)
    pending = (truncation.top_k >= logits.shape[1]).nonzero().squeeze(1)
    candidates = logits
    for _ in range(MAX_ELIMINATIONS):
        if not len(pending):
            break
        drawn = best_free(candidates[pending], truncation.temperature[pending], keys[pending])[0]
        keeps, drops = judge_tokens(logits[pending], drawn, truncation.rows(pending))
        tokens[pending], settled[pending] = drawn, keeps
        pending, drawn = pending[drops], drawn[drops]
        worst = logits[pending].gather(1, drawn[:, None])
        if candidates is logits and len(pending):
            candidates = logits.clone()
        candidates[pending] = candidates[pending].masked_fill(logits[pending] <= worst, float("-inf"))
    return tokens, settled


def draw_sorted(logits: Tensor, keys: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """Draw from the rows sorted in full, which settles all of them; waits for no value."""
    return _draw_among(logits, keys, truncation, logits.shape[1])


def _draw_among(logits: Tensor, keys: Tensor, truncation: Truncation, size: int) -> tuple[Tensor, Tensor]:
    """Draw among the best `size` candidates; settled when none of the kept ones may have equals left out."""
    values, ids = ordered_candidates(logits, size)
    kept = kept_candidates(logits, values, truncation)
    scores = values.to(torch.float64) / truncation.temperature[:, None] + gumbel_noise(keys, ids)
    best = scores.masked_fill(~kept, float("-inf")).argmax(dim=-1, keepdim=True)
    tokens = ids.gather(1, best).squeeze(1)
    if size == logits.shape[1]:
        return tokens, torch.ones(len(logits), dtype=torch.bool)
    return tokens, ~(kept & (values == values[:, -1:])).any(dim=-1)


def noise_keys(rows: list[RequestSampling], positions: list[int]) -> list[NoiseKey]:
    return [NoiseKey(row.seed, row.choice, position) for row, position in zip(rows, positions, strict=True)]


def is_free(row: RequestSampling, vocab_size: int) -> bool:
    """Whether any token may be drawn, or the best one is asked for."""
    return row.temperature == 0.0 or (row.top_p >= 1.0 and row.min_p <= 0.0 and not 0 < row.top_k < vocab_size)


def top_k_of(row: RequestSampling, vocab_size: int) -> int:
    """How many tokens top-k keeps: all where it is off."""
    return min(row.top_k, vocab_size) if row.top_k > 0 else vocab_size


def truncation_of(rows: list[RequestSampling], vocab_size: int) -> Truncation:
    return Truncation(
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float64),
        top_k=torch.tensor([top_k_of(row, vocab_size) for row in rows]),
        top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float64),
        min_p=torch.tensor([row.min_p for row in rows], dtype=torch.float64),
    )


def best_free(logits: Tensor, temperatures: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens `[num_rows]` of all from `first` on: argmax of logit / temperature + noise, without computing it for all;
    and these sums.

    A block of 32 tokens can't beat its largest scaled logit plus its largest noise, and both are cheap to know. The
    blocks of the highest bounds are evaluated; when the best score found is not below the next bound, no other token
    can win. Otherwise four times as many blocks are looked at, in the end all: the result is always that of the full
    argmax. `logits` is `[num_rows, num_tokens]`; `temperatures` `[num_rows]` float64, above 0.
    """
    before = first % BLOCK_SIZE
    first -= before
    logits = _padded(logits, before)
    highest = logits.view(len(logits), -1, BLOCK_SIZE).amax(dim=-1)
    noise = block_noise_bound(keys, highest.shape[1], first // BLOCK_SIZE)
    bounds = highest.to(torch.float64) / temperatures[:, None] + noise
    tokens = torch.empty(len(logits), dtype=torch.int64)
    best = torch.empty(len(logits), dtype=torch.float64)
    pending = torch.arange(len(logits))
    num_blocks = FIRST_BLOCKS
    while len(pending):
        num_blocks = min(num_blocks, bounds.shape[1])
        drawn, scores = _best_of(
            logits[pending], temperatures[pending], keys[pending], bounds[pending], num_blocks, first
        )
        tokens[pending], best[pending] = drawn, scores
        open_blocks = (bounds[pending] >= scores[:, None]).sum(dim=-1)
        pending = pending[open_blocks > num_blocks]
        num_blocks *= 4
    return tokens, best


def _best_of(
    logits: Tensor, temperatures: Tensor, keys: Tensor, bounds: Tensor, num_blocks: int, first: int
) -> tuple[Tensor, Tensor]:
    """Best token of the `num_blocks` blocks with the highest bounds, and its score: both `[num_rows]`."""
    blocks = bounds.topk(num_blocks, dim=-1).indices.sort(dim=-1).values
    ids = (blocks[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
    scores = logits.gather(1, ids).to(torch.float64) / temperatures[:, None] + gumbel_noise(keys, ids + first)
    best, place = scores.max(dim=-1)
    return ids.gather(1, place[:, None]).squeeze(1) + first, best


def _padded(logits: Tensor, before: int) -> Tensor:
    """Whole blocks, with so many tokens `before`: what is added can't be drawn."""
    missing = -(before + logits.shape[1]) % BLOCK_SIZE
    if not before and not missing:
        return logits
    return torch.nn.functional.pad(logits, (before, missing), value=float("-inf"))
