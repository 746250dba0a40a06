"""Root-mean-square normalisation, computed in float32 and cast before the weight is applied, as Hugging Face does."""

import torch


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension. `weight` broadcasts against `x`."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., size]`."""
        wide = rows.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._weight * (wide * scale).to(rows.dtype)
