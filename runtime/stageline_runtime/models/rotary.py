"""Rotary position embedding: the table of a model, and its application to queries and keys.

Angles are computed in float32 and the cosines and sines then cast to the model's dtype, as Hugging Face does, so that
bfloat16 runs round alike. Formula: Su et al. 2021 (arXiv 2104.09864), half-split form.
"""

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.protocol import CPU
from stageline_runtime.models.rope_scaling import scaled_frequencies


class RotaryTable:
    """Cosines and sines `[num_positions, head_dim]` of a model, in its dtype."""

    def __init__(self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self.dtype = dtype
        frequencies, amplitude = scaled_frequencies(config, num_positions)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        both_halves = torch.cat((angles, angles), dim=-1)
        # Worked out on the CPU for every device, so that all have the same numbers.
        self._cosines = (both_halves.cos() * amplitude).to(dtype).to(device)
        self._sines = (both_halves.sin() * amplitude).to(dtype).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[num_tokens, 1, head_dim]` for int64 `positions` `[num_tokens]`."""
        return self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate `[num_tokens, num_heads, head_dim]` by `[num_tokens, 1, head_dim]` cosines and sines."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
