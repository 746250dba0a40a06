"""The experts of a mixture on a device: two grouped products over all local experts, with shapes from the plan.

Every pick of every token is a row, sorted by expert; rows of another rank's experts are last, belong to no group, and
count as zero. The host never reads the picks. torch's grouped product is one kernel for bfloat16 on sm_90 and sm_100,
and can be captured there (`Accelerator.queues_experts`); for other dtypes and devices torch itself loops over the
experts, and waits for the device once a product (`GroupedBlas.cpp` of PyTorch).
"""

import torch
import torch.nn.functional as F

from stageline_runtime.model_facts.model_config import UnsupportedModelError
from stageline_runtime.models.weights.stage_weights import ExpertWeights

_ALIGNMENT_BYTES = 16
"""Of each row of a grouped product."""


class GroupedExperts:
    """A `HeldExperts`; the sum of a token's experts is in ascending order of the expert, rounded once.

    Raises:
        UnsupportedModelError: the experts' sizes have no grouped product.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        self._first = weights.first
        self._gate_up = torch.stack(weights.gate_up).transpose(1, 2)
        self._down = torch.stack(weights.down).transpose(1, 2)
        _, inner, hidden = self._down.shape
        for size, what in ((hidden, "hidden size"), (inner, "inner size of an expert")):
            if size * self._down.element_size() % _ALIGNMENT_BYTES:
                raise UnsupportedModelError(
                    f"a device runs experts only where rows take a multiple of {_ALIGNMENT_BYTES} bytes; the {what} "
                    f"is {size} elements of {self._down.element_size()} bytes"
                )

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor, /) -> torch.Tensor:
        num_held, picks = len(self._down), picked.shape[1]
        picked, by_expert = picked.sort(dim=-1)
        weights = weights.gather(-1, by_expert)
        held = picked - self._first
        is_held = (held >= 0) & (held < num_held)
        groups, order = held.where(is_held, num_held).flatten().sort(stable=True)
        ends = torch.searchsorted(groups, torch.arange(num_held, device=rows.device), right=True, out_int32=True)
        gate, up = F.grouped_mm(rows[order // picks], self._gate_up, offs=ends).chunk(2, dim=-1)
        sorted_results = F.grouped_mm(F.silu(gate) * up, self._down, offs=ends)
        results = torch.empty_like(sorted_results)
        results[order] = sorted_results
        weighted = results.view(*picked.shape, -1) * weights[..., None]
        # What belongs to no group was never written, and may be anything.
        return weighted.masked_fill(~is_held[..., None], 0.0).sum(1).to(rows.dtype)
