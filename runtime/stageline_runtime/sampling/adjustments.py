"""Changes to one row's logits before the draw: logit bias, then repetition, frequency and presence penalty.

Repetition penalty (Keskar et al. 2019, section 4.1) divides a positive logit of any token of prompt or output and
multiplies a negative one. Frequency and presence penalty follow OpenAI's definition and count output alone:
`logit - count * frequency - (count > 0) * presence`. All of it happens before temperature, so greedy rows feel it too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.seen_tokens import SeenTokens

Placing = Callable[[Tensor], Tensor]
"""Brings a small tensor from the host to where the logits are."""


def stay(tensor: Tensor) -> Tensor:
    """For logits on the host: nothing to bring."""
    return tensor


def adjust(logits: Tensor, sampling: RequestSampling, seen: SeenTokens | None, place: Placing = stay) -> None:
    """Change `logits` `[vocab_size]` float32 in place. `seen` may be None when `sampling.has_penalties` is false."""
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        logits[place(torch.tensor(ids))] += place(torch.tensor(values, dtype=torch.float32))
    if seen is None:
        return
    seen_ids, output_counts = place(seen.ids), place(seen.output_counts)
    values_of_seen = logits[seen_ids]
    if (penalty := sampling.repetition_penalty) != 1.0:
        values_of_seen = (values_of_seen / penalty).where(values_of_seen > 0, values_of_seen * penalty)
    values_of_seen -= output_counts * sampling.frequency_penalty
    values_of_seen -= (output_counts > 0) * sampling.presence_penalty
    logits[seen_ids] = values_of_seen
