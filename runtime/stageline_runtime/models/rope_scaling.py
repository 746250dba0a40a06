"""Frequencies of the rotary embedding, scaled as long-context checkpoints ask: one set for a group, whatever its batch.

Where Hugging Face's frequencies depend on the longest request so far (`dynamic`, `longrope`), those of the longest that
the group takes (`maxModelLen`) hold for all: a key's rotation can't change once it lies in the cache. Up to the context
that was trained the two agree. Formulas: linear, Chen et al. 2023 (arXiv 2306.15595); `yarn`, Peng et al. 2023 (arXiv
2309.00071); `longrope`, Ding et al. 2024 (arXiv 2402.13753); `llama3` as published with Llama 3.1.
"""

import math
from typing import Any, Final

import torch

from stageline_runtime.model_facts.model_config import ModelConfig

_SINGULAR: Final = 0.001
_FAST_ROTATIONS: Final = 32.0
_SLOW_ROTATIONS: Final = 1.0
_MSCALE: Final = 0.1

Scaling = dict[str, Any]


def scaled_frequencies(config: ModelConfig, longest: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dimensions, `[head_dim / 2]` float32, and what cosines and sines are times.

    `longest` is how many positions a request of the group may have.
    """
    scaling, theta, size = config.rope_scaling, config.rope_theta, config.head_dim
    match scaling.get("rope_type") if scaling is not None else None:
        case "linear" if scaling is not None:
            return _plain(theta, size) / float(scaling["factor"]), 1.0
        case "llama3" if scaling is not None:
            return _llama3(_plain(theta, size), scaling), 1.0
        case "dynamic" if scaling is not None:
            trained = int(scaling["longest"])
            stretch = float(scaling["factor"]) * max(longest, trained) / trained - (float(scaling["factor"]) - 1)
            return _plain(theta * stretch ** (size / (size - 2)), size), 1.0
        case "yarn" if scaling is not None:
            return _yarn(theta, size, scaling), _yarn_amplitude(scaling)
        case "longrope" if scaling is not None:
            is_long = longest > scaling["original_max_position_embeddings"]
            factors = torch.tensor(scaling["long_factor" if is_long else "short_factor"], dtype=torch.float32)
            return 1.0 / (factors * theta ** _exponents(size)), _longrope_amplitude(scaling)
        case _:
            return _plain(theta, size), 1.0


def _exponents(size: int) -> torch.Tensor:
    return torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size


def _plain(theta: float, size: int) -> torch.Tensor:
    return 1.0 / (theta ** _exponents(size))


def _llama3(frequencies: torch.Tensor, scaling: Scaling) -> torch.Tensor:
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


def _yarn(theta: float, size: int, scaling: Scaling) -> torch.Tensor:
    """Keep dimensions that turn often within the trained context, slow down those that don't, a ramp in between."""
    trained = float(scaling["original_max_position_embeddings"])

    def dimension_of(rotations: float) -> float:
        return size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(float(scaling.get("beta_fast") or _FAST_ROTATIONS))
    high = dimension_of(float(scaling.get("beta_slow") or _SLOW_ROTATIONS))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += _SINGULAR
    slowed = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - slowed
    periods = theta ** _exponents(size)
    return 1.0 / (float(scaling["factor"]) * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_amplitude(scaling: Scaling) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def grown(share: float) -> float:
        factor = float(scaling["factor"])
        return 1.0 if factor <= 1 else _MSCALE * share * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(float(scaling["mscale"])) / grown(float(scaling["mscale_all_dim"]))
    return grown(1.0)


def _longrope_amplitude(scaling: Scaling) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(scaling["factor"])
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(float(scaling["original_max_position_embeddings"])))
