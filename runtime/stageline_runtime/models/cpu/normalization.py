"""Root-mean-square normalisation, computed in float32 and cast before the weight is applied, as Hugging Face does.

Eager rows go through the compiled kernel where there is one; code that torch.compile looks into uses plain operators,
which it fuses by itself.
"""

import torch

from stageline_runtime.models.native.row_kernels import RowKernels


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension. `weight` broadcasts against `x`."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: RowKernels | None = None) -> None:
        self._weight = weight
        self._eps = eps
        self._kernels = kernels

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., size]`."""
        if self._kernels is not None and not torch.compiler.is_compiling():
            return self._kernels.rms_norm(rows, self._weight, self._eps)
        wide = rows.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._weight * (wide * scale).to(rows.dtype)

    def after_adding(self, rows: torch.Tensor, addend: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows + addend`, and that normalised. `addend` must not be used afterwards: the sum may take its place."""
        if self._kernels is not None and not torch.compiler.is_compiling():
            return addend, self._kernels.add_rms_norm(rows, addend, self._weight, self._eps)
        added = rows + addend
        return added, self(added)
