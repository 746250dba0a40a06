"""Which tokens top-k, top-p and min-p leave, decided from part of the vocabulary where that is provably enough.

A row's candidates are ordered by logit, highest first, lower token id first among equals. Top-k keeps the first k;
top-p keeps a candidate while the mass before it, within what top-k kept, is below `top_p`; min-p keeps those at least
`min_p` times as likely as the first. Masses are summed in float32 first; where a decision lies within what that may be
wrong by, float64 decides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MASS_TOLERANCE = 1e-5
"""Relative error of a mass summed from float32 exponentials: a few ulp times the logits' spread."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Parameters of several rows, each `[num_rows]`: `top_k` int64 (the vocabulary size when off), others float64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def rows(self, index: Tensor) -> "Truncation":
        return Truncation(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])


def ordered_candidates(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The best `size` logits and their token ids, highest first, lower id first among equals."""
    if size == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(size, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def kept_candidates(logits: Tensor, values: Tensor, truncation: Truncation) -> Tensor:
    """Mask `[num_rows, num_candidates]` of what is left of the ordered candidates with logits `values`."""

    def total_of(rows: Tensor, before: Tensor) -> Tensor:
        return _total_mass(logits[rows], values[rows, 0], truncation.rows(rows), before)

    return kept_among(values, truncation, logits.shape[1], total_of)


def kept_among(
    values: Tensor, truncation: Truncation, vocab_size: int, total_of: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The same of candidates out of `vocab_size` tokens. `total_of` says the mass of the whole vocabulary, relative to
    the best token, for some rows, by the masses before each of their candidates.
    """
    num_candidates = values.shape[1]
    weights = _weights(values, values[:, 0], truncation.temperature)
    in_top_k = torch.arange(num_candidates, device=values.device)[None, :] < truncation.top_k[:, None]
    inside = weights.masked_fill(~in_top_k, 0.0)
    before = torch.nn.functional.pad(inside.cumsum(dim=-1)[:, :-1], (1, 0))
    total = inside.sum(dim=-1)
    # Top-k cut inside the candidates: they hold the whole mass. Otherwise the rest of the vocabulary counts too.
    if num_candidates < vocab_size:
        wide = ((truncation.top_k > num_candidates) & (truncation.top_p < 1.0)).nonzero().squeeze(1)
        if len(wide):
            total[wide] = total_of(wide, before[wide])
    in_top_p = (before < truncation.top_p[:, None] * total[:, None]) | (truncation.top_p >= 1.0)[:, None]
    in_top_p[:, 0] = True
    in_min_p = (weights >= truncation.min_p[:, None]) & (values > float("-inf"))
    return in_top_k & in_top_p & in_min_p


def judge_tokens(logits: Tensor, tokens: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """Whether each row surely keeps its token, and whether it surely drops it: both `[num_rows]`.

    Only for rows whose top-k is off; neither holds where float32 and ties leave it open.
    """
    highest = logits.amax(dim=-1)
    own = logits.gather(1, tokens[:, None])
    weights = ((logits - highest[:, None]) * truncation.temperature[:, None].reciprocal().float()).exp_()
    total = weights.sum(dim=-1, dtype=torch.float64)
    better = weights.masked_fill(logits <= own, 0.0).sum(dim=-1, dtype=torch.float64)
    not_worse = weights.masked_fill_(logits < own, 0.0).sum(dim=-1, dtype=torch.float64)
    own_weight = _weights(own, highest, truncation.temperature)[:, 0]
    in_min_p = own_weight >= truncation.min_p
    off = truncation.top_p >= 1.0
    keeps = in_min_p & ((not_worse - own_weight < (truncation.top_p - MASS_TOLERANCE) * total) | off)
    drops = ~in_min_p | ((better >= (truncation.top_p + MASS_TOLERANCE) * total) & ~off & (own[:, 0] < highest))
    return keeps, drops


def _total_mass(logits: Tensor, highest: Tensor, truncation: Truncation, before: Tensor) -> Tensor:
    """Mass of the whole vocabulary relative to the best token, exact enough for every decision about `before`."""
    total = rough_mass(logits, highest, truncation.temperature)
    unsure = is_unsure(total, before, truncation.top_p).nonzero().squeeze(1)
    if len(unsure):
        total[unsure] = _weights(logits[unsure], highest[unsure], truncation.temperature[unsure]).sum(dim=-1)
    return total


def rough_mass(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """Mass `[num_rows]` float64 of all tokens relative to one with logit `highest`, summed from float32."""
    scaled = (logits - highest[:, None]) * temperature[:, None].reciprocal().float()
    return scaled.exp_().sum(dim=-1, dtype=torch.float64)


def is_unsure(total: Tensor, before: Tensor, top_p: Tensor) -> Tensor:
    """Rows `[num_rows]` for which a top-p over a rough `total` may decide wrongly about a candidate."""
    margin = (before - (top_p * total)[:, None]).abs().amin(dim=-1)
    return margin <= MASS_TOLERANCE * total


def _weights(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """Likelihood relative to the best token, float64."""
    return ((logits.to(torch.float64) - highest[:, None].to(torch.float64)) / temperature[:, None]).exp()
