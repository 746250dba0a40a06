"""On a device experts run in two grouped products; what each token gets is what it gets from one expert at a time."""

import pytest
import torch

from stageline_runtime.models.device.grouped_experts import GroupedExperts
from stageline_runtime.models.layers.feed_forward import ExpertLoop
from stageline_runtime.models.weights.stage_weights import ExpertWeights

NUM_EXPERTS, HIDDEN, INNER = 8, 32, 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [range(8), range(2), range(2, 4), range(6, 8)])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_every_token_gets_the_same(num_tokens: int, held: range, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(num_tokens + held.start)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn).div(HIDDEN**0.5).to(dtype)

    weights = ExpertWeights(
        router=draw(NUM_EXPERTS, HIDDEN),
        gate_up=tuple(draw(2 * INNER, HIDDEN) for _ in held),
        down=tuple(draw(HIDDEN, INNER) for _ in held),
        first=held.start,
    )
    rows = draw(num_tokens, HIDDEN).mul(HIDDEN**0.5)
    shares, picked = torch.rand(num_tokens, NUM_EXPERTS, generator=drawn).topk(3)
    expected = ExpertLoop(weights)(rows, shares, picked)
    result = GroupedExperts(weights)(rows, shares, picked)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.03  # the loop rounds its sum after each expert
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    none_held = ~((picked >= held.start) & (picked < held.stop)).any(1)
    assert not result[none_held].any()


def test_tokens_that_pick_nothing_held_here_get_zeros_whatever_their_rows_hold() -> None:
    weights = ExpertWeights(
        router=torch.zeros(4, HIDDEN),
        gate_up=(torch.ones(2 * INNER, HIDDEN),),
        down=(torch.ones(HIDDEN, INNER),),
        first=3,
    )
    rows = torch.full((2, HIDDEN), torch.nan)
    result = GroupedExperts(weights)(rows, torch.ones(2, 1), torch.tensor([[0], [2]]))
    assert torch.equal(result, torch.zeros(2, HIDDEN))
