"""The sampler's draws on a device, without ever waiting for it: no step depends on a value that was computed.

On the CPU the sampler looks at values to leave work out; here every row is scored in full, by the same noise and the
same rules, so that both draw the same tokens from the same logits. Rows with top-k, top-p or min-p alone pay for these.
"""

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.adjustments import Placing
from stageline_runtime.sampling.device_truncation import kept_tokens
from stageline_runtime.sampling.noise import gumbel_noise, mixed_keys
from stageline_runtime.sampling.sampler import noise_keys, truncation_of
from stageline_runtime.sampling.truncation import Truncation


@torch.inference_mode()
def sample_on_device(logits: Tensor, rows: list[RequestSampling], positions: list[int], place: Placing) -> Tensor:
    """Draw tokens `[num_rows]` int64 from float32 `logits` `[num_rows, vocab_size]`, all on the logits' device."""
    best = logits.argmax(dim=-1)
    if all(row.temperature <= 0.0 for row in rows):
        return best
    vocab_size = logits.shape[1]
    host = truncation_of(rows, vocab_size)
    # Greedy rows go along, with a temperature that divides.
    is_greedy = host.temperature <= 0.0
    temperature = host.temperature.masked_fill(is_greedy, 1.0)
    truncation = Truncation(place(temperature), place(host.top_k), place(host.top_p), place(host.min_p))
    keys = place(mixed_keys(noise_keys(rows, positions)))
    scores = _scores(logits, keys, truncation)
    is_restricted = ((host.top_p < 1.0) | (host.min_p > 0.0) | (host.top_k < vocab_size)) & ~is_greedy
    if bool(is_restricted.any()):
        # The host knows which rows these are: the others don't pay for them.
        chosen = place(is_restricted.nonzero().squeeze(1))
        kept = kept_tokens(logits.index_select(0, chosen), truncation.rows(chosen))
        scores.index_copy_(0, chosen, scores.index_select(0, chosen).masked_fill_(~kept, float("-inf")))
    return torch.where(place(is_greedy), best, scores.argmax(dim=-1))


def _scores(logits: Tensor, keys: Tensor, truncation: Truncation) -> Tensor:
    ids = torch.arange(logits.shape[1], device=logits.device).expand(len(logits), -1)
    return logits.to(torch.float64) / truncation.temperature[:, None] + gumbel_noise(keys, ids)
