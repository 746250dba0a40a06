"""Rotary position embedding: the table of a model, and its application to queries and keys.

Angles are computed in float32 and the cosines and sines then cast to the model's dtype, as Hugging Face does, so that
bfloat16 runs round alike. Formula: Su et al. 2021 (arXiv 2104.09864), half-split form; frequency scaling of rope type
`llama3` as published with Llama 3.1.
"""

import math
from typing import Any

import torch

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.protocol import CPU


class RotaryTable:
    """Cosines and sines `[num_positions, head_dim]` of a model, in its dtype."""

    def __init__(self, config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self.dtype = dtype
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(config)[None, :]
        both_halves = torch.cat((angles, angles), dim=-1)
        # Worked out on the CPU for every device, so that all have the same numbers.
        self._cosines = both_halves.cos().to(dtype).to(device)
        self._sines = both_halves.sin().to(dtype).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[num_tokens, 1, head_dim]` for int64 `positions` `[num_tokens]`."""
        return self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate `[num_tokens, num_heads, head_dim]` by `[num_tokens, 1, head_dim]` cosines and sines."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair of dimensions, `[head_dim / 2]` float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _scale_llama3(frequencies, config.rope_scaling)


def _scale_llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Slow down long wavelengths by `factor`, keep short ones, blend in between."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained_positions = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / factor
    blend = (trained_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * slowed + blend * frequencies
    is_long = wavelengths > trained_positions / low
    is_short = wavelengths < trained_positions / high
    return torch.where(is_long, slowed, torch.where(is_short, frequencies, blended))
