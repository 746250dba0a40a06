"""Experts in grouped products on a device, compared with one expert after the other on the CPU; also captured."""

from dataclasses import dataclass
from typing import Final

import torch

from stageline_bench.gpu_check.device_times import median_microseconds
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.models.device.grouped_experts import GroupedExperts
from stageline_runtime.models.layers.feed_forward import ExpertLoop
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
        """Between results on `device` and on the CPU, with weights and picks derived from the case."""
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
    """All experts, and a rank's part of them; one token, some, and the tokens of a prefill."""
    return [
        ExpertCase(dtype=dtype, held=held, num_tokens=num_tokens)
        for dtype in TOLERANCE
        for held in (range(NUM_EXPERTS), range(4, 8))
        for num_tokens in (1, 16, 500)
    ]


LARGE_EXPERTS: Final = 128
LARGE_PICKS: Final = 8
LARGE_HIDDEN, LARGE_INNER = 2048, 768
"""A layer of Qwen3-30B-A3B."""
CAPTURED_TOKENS: Final = (1, 64)


def captured_figures(accelerator: Accelerator) -> dict[str, str]:
    """Microseconds of a large mixture's experts, eager and replayed; raises ValueError if results differ."""
    device, dtype = accelerator.device, torch.bfloat16
    draw = torch.Generator(device).manual_seed(5)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device, dtype=dtype).div_(shape[-1] ** 0.5)

    experts = GroupedExperts(
        ExpertWeights(
            router=weight(LARGE_EXPERTS, LARGE_HIDDEN),
            gate_up=tuple(weight(2 * LARGE_INNER, LARGE_HIDDEN) for _ in range(LARGE_EXPERTS)),
            down=tuple(weight(LARGE_HIDDEN, LARGE_INNER) for _ in range(LARGE_EXPERTS)),
            first=0,
        )
    )
    recorder = accelerator.graph_recorder()
    figures = {}
    for tokens in CAPTURED_TOKENS:
        rows = weight(tokens, LARGE_HIDDEN)
        shares, picked = torch.rand(tokens, LARGE_EXPERTS, generator=draw, device=device).topk(LARGE_PICKS)
        graph, result = recorder.record(lambda: experts(rows, shares, picked))  # noqa: B023 - recorded at once
        other = torch.rand(tokens, LARGE_EXPERTS, generator=draw, device=device).topk(LARGE_PICKS)
        for kept, drawn in zip((shares, picked), other, strict=True):
            kept.copy_(drawn)
        graph.replay()
        replayed, expected = result.clone(), experts(rows, shares, picked)
        if not torch.equal(replayed, expected):
            difference = float((replayed.float() - expected.float()).abs().max())
            raise ValueError(f"{tokens} tokens with other picks than were recorded: replay differs by {difference}")
        eager = median_microseconds(accelerator, lambda: experts(rows, shares, picked))  # noqa: B023 - run at once
        figures[f"{tokens} tokens"] = (
            f"eager {eager:.0f} µs, replayed {median_microseconds(accelerator, graph.replay):.0f} µs"
        )
    return figures
