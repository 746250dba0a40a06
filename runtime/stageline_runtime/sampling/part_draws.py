"""Draws by parts of the vocabulary, of which each rank of a stage has the logits: what `sampler.sample` would draw.

Of a row that nothing restricts each part gives its best token and that one's score, logit / temperature + noise; the
best of the parts is the row's token, since noise depends on the token's id and not on who looks at it. Of a restricted
row each part gives its best 256 tokens and its mass. The best 256 of all are among these, and decide as they do in the
sampler; where they don't, or a mass summed from float32 is too close to a border, the row is left open, and the logits
have to be gathered. Pure: what crosses between the parts is a tensor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.noise import gumbel_noise, mixed_keys
from stageline_runtime.sampling.sampler import PREFILTER_SIZE, best_free, best_tokens, noise_keys, truncation_of
from stageline_runtime.sampling.truncation import is_unsure, kept_among, ordered_candidates, rough_mass

OPEN = -1
"""In place of a token: the parts alone don't settle it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How it is divided: each part has `width` tokens, but for the last one, which may have fewer."""

    size: int
    width: int

    @property
    def num_candidates(self) -> int:
        """Of each part, in what it gives of a restricted row."""
        return min(PREFILTER_SIZE, self.width)


def best_of_part(logits: Tensor, first: int, rows: list[RequestSampling], positions: list[int]) -> Tensor:
    """Of each free row the best token of a part: `[num_rows, 2]` float64, its score and its id. `logits` are float32,
    of the tokens from `first` on.
    """
    tokens = best_tokens(logits)
    best = torch.stack((logits.gather(1, tokens[:, None])[:, 0].double(), (tokens + first).double()), dim=1)
    sampled = [index for index, row in enumerate(rows) if row.temperature > 0.0]
    if sampled:
        keys = mixed_keys(noise_keys([rows[index] for index in sampled], [positions[index] for index in sampled]))
        temperatures = torch.tensor([rows[index].temperature for index in sampled], dtype=torch.float64)
        drawn, scores = best_free(logits[sampled], temperatures, keys, first)
        best[sampled] = torch.stack((scores, drawn.double()), dim=1)
    return best


def best_of_parts(parts: Tensor) -> Tensor:
    """Tokens `[num_rows]` int64 from what `best_of_part` gave for each part, `[num_parts, num_rows, 2]`, in the order
    of their tokens: of equal scores the lowest id, as with one part.
    """
    scores, tokens = parts.unbind(-1)
    return tokens.gather(0, scores.argmax(dim=0, keepdim=True))[0].long()


def candidates_of_part(logits: Tensor, first: int, rows: list[RequestSampling], vocabulary: Vocabulary) -> Tensor:
    """Of each restricted row a part's best tokens, and its mass relative to the best of them: float64 `[num_rows,
    2 * num_candidates + 1]`, logits, ids, mass. A part with fewer tokens gives some that can't be drawn.
    """
    count = min(vocabulary.num_candidates, logits.shape[1])
    values, ids = ordered_candidates(logits, count)
    temperature = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
    mass = rough_mass(logits, values[:, 0], temperature)
    missing = (0, vocabulary.num_candidates - count)
    padded = torch.nn.functional.pad(values.double(), missing, value=float("-inf"))
    return torch.cat((padded, torch.nn.functional.pad((ids + first).double(), missing), mass[:, None]), dim=1)


def draw_among_parts(
    parts: Tensor, rows: list[RequestSampling], positions: list[int], vocabulary: Vocabulary
) -> Tensor:
    """Tokens `[num_rows]` int64, or `OPEN`, from what `candidates_of_part` gave for each part, `[num_parts, num_rows,
    2 * num_candidates + 1]`, in the order of their tokens.
    """
    count = vocabulary.num_candidates
    is_whole = count == vocabulary.width
    values, ids = _joined(parts[..., :count]), _joined(parts[..., count:-1]).long()
    values, order = values.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if not is_whole:
        values, ids = values[:, :count], ids[:, :count]
    truncation = truncation_of(rows, vocabulary.size)
    unsure = torch.zeros(len(rows), dtype=torch.bool)

    def total_of(wide: Tensor, before: Tensor) -> Tensor:
        best, mass = parts[:, wide, 0], parts[:, wide, -1]
        total = (mass * ((best - values[wide, 0]) / truncation.temperature[wide]).exp()).sum(dim=0)
        unsure[wide] = is_unsure(total, before, truncation.top_p[wide])
        return total

    kept = kept_among(values, truncation, values.shape[1] if is_whole else vocabulary.size, total_of)
    noise = gumbel_noise(mixed_keys(noise_keys(rows, positions)), ids)
    scores = (values / truncation.temperature[:, None] + noise).masked_fill(~kept, float("-inf"))
    tokens = ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
    if is_whole:
        return tokens
    reaches_past = (truncation.top_k > count) & (truncation.top_k < vocabulary.size)
    may_have_equals = (kept & (values == values[:, -1:])).any(dim=-1)
    return tokens.masked_fill(unsure | reaches_past | may_have_equals, OPEN)


def _joined(parts: Tensor) -> Tensor:
    """`[num_parts, num_rows, n]` as `[num_rows, num_parts * n]`."""
    return parts.transpose(0, 1).flatten(1)
