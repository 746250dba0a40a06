"""Draws one token per row: greedy, or temperature, top-k, top-p, min-p and keyed Gumbel noise, in this order.

A row's candidates are ordered by logit, highest first, lower token id first among equals. Top-k keeps the first k;
top-p keeps a candidate while the mass before it, within what top-k kept, is below `top_p`; min-p keeps those at least
`min_p` times as likely as the first; the token is the kept candidate with the largest logit / temperature + noise,
which is a draw from their softmax (Gumbel-max). Only the best 256 candidates are ordered; a row they provably don't
settle is done again over the whole vocabulary, so the result is always that of a full sort. A row's token depends on
nothing but its logits and parameters, never on its batch.
"""

from dataclasses import dataclass

import torch

from stageline_runtime.sampling.noise import NoiseKey, gumbel_noise

PREFILTER_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """Parameters of one draw. `temperature` 0 is greedy, `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    choice: int
    position: int
    """Position of the token being drawn."""


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Draw tokens `[num_rows]` int64 from float32 `logits` `[num_rows, vocab_size]`."""
    sampled = [index for index, row in enumerate(rows) if row.temperature > 0.0]
    if len(sampled) == len(rows):
        return _sample_rows(logits, rows) if rows else torch.empty(0, dtype=torch.int64)
    tokens = logits.argmax(dim=-1)
    if sampled:
        tokens[sampled] = _sample_rows(logits[sampled], [rows[index] for index in sampled])
    return tokens


def _sample_rows(logits: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Rows with a temperature: unrestricted ones need no order at all, the others try the prefilter first."""
    vocab_size = logits.shape[1]
    scaled = logits.to(torch.float64) / torch.tensor([row.temperature for row in rows], dtype=torch.float64)[:, None]
    tokens = torch.empty(len(rows), dtype=torch.int64)
    free = [i for i, row in enumerate(rows) if _is_free(row, vocab_size)]
    restricted = sorted(set(range(len(rows))) - set(free))
    if free:
        tokens[free] = _draw_free(scaled[free], [rows[i] for i in free])
    size = min(PREFILTER_SIZE, vocab_size)
    while restricted:
        drawn, settled = _draw_restricted(scaled[restricted], [rows[i] for i in restricted], size)
        tokens[restricted] = drawn
        restricted = [i for i, done in zip(restricted, settled.tolist(), strict=True) if not done]
        size = vocab_size
    return tokens


def _is_free(row: SamplingRow, vocab_size: int) -> bool:
    return row.top_p >= 1.0 and row.min_p <= 0.0 and not 0 < row.top_k < vocab_size


def _draw_free(scaled: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    ids = torch.arange(scaled.shape[1]).expand_as(scaled)
    return (scaled + gumbel_noise(_keys(rows), ids)).argmax(dim=-1)


def _draw_restricted(scaled: torch.Tensor, rows: list[SamplingRow], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the best `size` candidates: tokens `[num_rows]`, and whether each row is settled by them."""
    values, ids = _ordered_candidates(scaled, size)
    kept = _kept_candidates(scaled, values, rows)
    scores = (values + gumbel_noise(_keys(rows), ids)).masked_fill(~kept, float("-inf"))
    tokens = ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
    if size == scaled.shape[1]:
        return tokens, torch.ones(len(rows), dtype=torch.bool)
    # A candidate equal to the last one may have equals that the prefilter left out and that come before it, and the
    # mass of a top-k that reaches past the candidates is not known.
    is_open = torch.tensor([size < row.top_k < scaled.shape[1] for row in rows])
    return tokens, ~(is_open | (kept & (values == values[:, -1:])).any(dim=-1))


def _ordered_candidates(scaled: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `size` values and their token ids, highest first, lower id first among equals."""
    _, ids = scaled.topk(size, dim=-1)
    ids = ids.sort(dim=-1).values
    values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _kept_candidates(scaled: torch.Tensor, values: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Mask `[num_rows, num_candidates]` of what top-k, top-p and min-p leave of the ordered `values`."""
    num_candidates, vocab_size = values.shape[1], scaled.shape[1]
    limits = torch.tensor([row.top_k if row.top_k > 0 else vocab_size for row in rows])[:, None]
    in_top_k = torch.arange(num_candidates)[None, :] < limits
    highest = values[:, :1]
    weights = (values - highest).exp().masked_fill(~in_top_k, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    # Top-k cut inside the candidates: they hold the whole mass. Otherwise the rest of the vocabulary counts too.
    open_rows = (limits[:, 0] > num_candidates).nonzero().squeeze(1)
    if len(open_rows):
        total[open_rows] = (scaled[open_rows] - highest[open_rows]).exp().sum(dim=-1, keepdim=True)
    before = torch.nn.functional.pad(weights.cumsum(dim=-1)[:, :-1], (1, 0))
    top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float64)[:, None]
    in_top_p = (before < top_p * total) | (top_p >= 1.0)
    in_top_p[:, 0] = True
    min_p = torch.tensor([row.min_p for row in rows], dtype=torch.float64)[:, None]
    in_min_p = (values - highest).exp() >= min_p
    return in_top_k & in_top_p & in_min_p


def _keys(rows: list[SamplingRow]) -> list[NoiseKey]:
    return [NoiseKey(row.seed, row.choice, row.position) for row in rows]
