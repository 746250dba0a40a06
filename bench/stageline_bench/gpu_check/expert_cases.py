"""Experts on a device, in grouped products, beside the same experts one after the other on the CPU."""

from dataclasses import dataclass

import torch

from stageline_runtime.models.cpu.feed_forward import ExpertLoop
from stageline_runtime.models.device.grouped_experts import GroupedExperts
from stageline_runtime.models.weights.stage_weights import ExpertWeights

NUM_EXPERTS, PICKS, HIDDEN, INNER = 16, 4, 256, 192
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of results around 1. In bfloat16 the CPU's loop rounds its sum after each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCase:
    dtype: torch.dtype
    held: range
    num_tokens: int

    def largest_error(self, device: torch.device) -> float:
        """Between results on `device` and on the CPU, by weights and picks that follow from the case."""
        drawn = torch.Generator().manual_seed(self.num_tokens + self.held.start)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=drawn).div(shape[-1] ** 0.5).to(self.dtype)

        gate_up = tuple(draw(2 * INNER, HIDDEN) for _ in self.held)
        down = tuple(draw(HIDDEN, INNER) for _ in self.held)
        weights = ExpertWeights(router=draw(NUM_EXPERTS, HIDDEN), gate_up=gate_up, down=down, first=self.held.start)
        shares, picked = torch.rand(self.num_tokens, NUM_EXPERTS, generator=drawn).topk(PICKS)
        rows = draw(self.num_tokens, HIDDEN).mul(HIDDEN**0.5)
        expected = ExpertLoop(weights)(rows, shares, picked)
        on_device = ExpertWeights(
            router=weights.router.to(device),
            gate_up=tuple(weight.to(device) for weight in gate_up),
            down=tuple(weight.to(device) for weight in down),
            first=weights.first,
        )
        result = GroupedExperts(on_device)(rows.to(device), shares.to(device), picked.to(device))
        return float((result.cpu().float() - expected.float()).abs().max())


def cases() -> list[ExpertCase]:
    """All experts held, and a rank's part of them; one token, some, and as many as a prefill has."""
    return [
        ExpertCase(dtype=dtype, held=held, num_tokens=num_tokens)
        for dtype in TOLERANCE
        for held in (range(NUM_EXPERTS), range(4, 8))
        for num_tokens in (1, 16, 500)
    ]
