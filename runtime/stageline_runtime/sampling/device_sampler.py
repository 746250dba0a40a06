"""The sampler's draws on a device, without ever waiting for it: no step depends on a value that was computed.

On the CPU the sampler looks at values to leave work out; here every row takes the whole way, by the same noise and the
same rules, so that both draw the same tokens from the same logits.
"""

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.adjustments import Placing
from stageline_runtime.sampling.noise import gumbel_noise, mixed_keys
from stageline_runtime.sampling.sampler import draw_sorted, noise_keys, truncation_of
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
    is_free = (host.top_p >= 1.0) & (host.min_p <= 0.0) & (host.top_k >= vocab_size)
    draw = _draw_free if bool((is_free | is_greedy).all()) else _draw_sorted
    return torch.where(place(is_greedy), best, draw(logits, keys, truncation))


def _draw_free(logits: Tensor, keys: Tensor, truncation: Truncation) -> Tensor:
    ids = torch.arange(logits.shape[1], device=logits.device).expand(len(logits), -1)
    scores = logits.to(torch.float64) / truncation.temperature[:, None] + gumbel_noise(keys, ids)
    return scores.argmax(dim=-1)


def _draw_sorted(logits: Tensor, keys: Tensor, truncation: Truncation) -> Tensor:
    return draw_sorted(logits, keys, truncation)[0]
