"""Modules with weights that map each row separately: linear projections, RMS norm, and the last stage's output head.

A projection's weights are packed once at load for oneDNN, which saves the reordering that a plain matrix product
repeats at every step; at few rows that costs as much as the product itself. In bfloat16 packed and plain results are
bit-equal; in float32 they differ in rounding. Where this build or CPU has no such kernel, and on other devices, plain
products run. The choice depends only on dtype and machine.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.rank_cut import head_rows
from stageline_runtime.models.weights.stage_weights import StageWeights
from stageline_runtime.ranks.protocol import LoneRank, RankGroup

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
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return result


class RowOperators(Protocol):
    """What kernels do to rows in one pass over memory: those compiled for CPUs, or Triton's on a device."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`rows / rms(rows) * weight` for rows `[num_rows, size]`."""

    def add_rms_norm(self, rows: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The same of `rows + addend`; the sum takes `addend`'s place."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` `[num_rows, size]` for rows `[gate, up]` `[num_rows, 2 * size]`."""


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension. `weight` broadcasts against `x`.

    Computed in float32 and cast before the weight is applied, as Hugging Face does.
    """

    def __init__(self, weight: torch.Tensor, eps: float, kernels: RowOperators | None = None) -> None:
        self.weight = weight
        self.eps = eps
        self._kernels = kernels

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., size]`."""
        if self._kernels is not None:
            return self._kernels.rms_norm(rows, self.weight, self.eps)
        wide = rows.to(torch.float32)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(rows.dtype)

    def after_adding(self, rows: torch.Tensor, addend: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows + addend`, and that normalised. `addend` must not be used afterwards: the sum may take its place."""
        if self._kernels is not None:
            return addend, self._kernels.add_rms_norm(rows, addend, self.weight, self.eps)
        added = rows + addend
        return added, self(added)


class OutputHead:
    """The final norm, then logits over the vocabulary, on whatever device the weights are.

    Reads its own weights, except a matrix that the stage already holds as its `embedding`. Where the stage has several
    ranks, each computes the logits of its part of the vocabulary and all gather them, so that every rank has all.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: StageWeights,
        embedding: torch.Tensor | None,
        kernels: RowOperators | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self._ranks = ranks if ranks is not None else LoneRank()
        self._width = head_rows(config.vocab_size, self._ranks.size)
        self.first_token = self._ranks.rank * self._width
        self._vocab_size = config.vocab_size
        self._final_norm = RmsNorm(weights.final_norm(), config.rms_norm_eps, kernels)
        self._to_vocabulary = Linear(weights.head(embedding))

    def __call__(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Map hidden `[num_rows, hidden_size]` to float32 logits `[num_rows, vocab_size]`."""
        part = self.part(hidden_rows)
        return part.to(torch.float32) if self._ranks.size == 1 else self.of_all(part)

    def part(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of the same in the weights' dtype, of the tokens from `first_token` on; no rank is asked."""
        return self._to_vocabulary(self._final_norm(hidden_rows))

    def of_all(self, part: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks' parts, which cross in the weights' dtype and are widened as they are laid out."""
        num_rows = len(part)
        part = F.pad(part, (0, self._width - part.shape[1])) if part.shape[1] < self._width else part
        gathered = self._ranks.all_gather(part, "all-gather, logits")
        wide = part.new_empty((num_rows, self._ranks.size * self._width), dtype=torch.float32)
        wide.view(num_rows, self._ranks.size, self._width).copy_(gathered.transpose(0, 1))
        # Whole parts in the order of the ranks; what pads the last one is cut off.
        return wide[:, : self._vocab_size].contiguous()
