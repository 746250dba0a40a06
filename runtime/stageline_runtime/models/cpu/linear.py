"""The one place where a weight matrix meets a batch: oneDNN kernels over weights packed once at load.

Packing saves the reordering that a plain matrix product repeats at every step, which at few rows costs as much as the
product itself. In bfloat16 packed and plain results are bit-equal; in float32 they differ in rounding. Where this
build or CPU has no such kernel, and on other devices, plain products run; which of the two runs is a function of
dtype and machine alone.
"""

import torch
import torch.nn.functional as F

from stageline_runtime.models.cpu.operators import packed_linear

_PACKED_FOR_ROWS = 8
"""A hint to oneDNN only; measured to make no difference between 8 and 64, for 1 to 512 rows."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine has a fast packed kernel for `dtype`."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class Linear:
    """`y = x W^T + b` for a weight `[out_features, in_features]`, which the caller may drop afterwards."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight: torch.Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._is_packed else weight
        )
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `[num_rows, in_features]` to `[num_rows, out_features]`."""
        if not self._is_packed:
            return F.linear(rows, self._weight, self._bias)
        if torch.compiler.is_compiling():
            return packed_linear(rows, self._weight, self._bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return result
