"""The one place where a weight matrix meets a batch, so that a faster kernel can be put behind it."""

import torch
import torch.nn.functional as F


class Linear:
    """`y = x W^T + b` for a weight `[out_features, in_features]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, in_features]` to `[num_rows, out_features]`."""
        return F.linear(rows, self._weight, self._bias)
