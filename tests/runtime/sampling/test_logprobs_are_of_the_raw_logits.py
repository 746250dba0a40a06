"""Log probabilities: the model's own distribution, whatever the request does to its logits, and only for who asks."""

import pytest
import torch

from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, StepPlan
from stageline_runtime.sampling.logprobs import LOWEST, RawLogprobs
from stageline_runtime.stage.step.sampling_state import SamplingState

VOCAB_SIZE = 50


def test_bias_and_temperature_change_the_token_but_not_its_log_probability() -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 3
    reference = torch.log_softmax(logits.double(), dim=-1)
    samplings = [
        RequestSampling(0.0, 1.0, 0, 0, 0, logit_bias=((7, 100.0),), num_top_logprobs=4),
        RequestSampling(0.0, 1.0, 0, 0, 0),
        RequestSampling(2.0, 0.5, 3, 9, 0, num_top_logprobs=0),
    ]
    fills = tuple(SlotFill(slot, 1, sampling) for slot, sampling in enumerate(samplings))
    rows = tuple(PlanRow(slot, 1, 0, 1, (5,), True) for slot in range(3))
    plan = StepPlan(0, 0, fills, rows, 3, -1, False, False)
    state = SamplingState()
    state.accept(plan)
    first, silent, last = state.sample(plan, logits.clone())[0].rows()
    assert first.token == 7
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(float(reference[0, 7]), abs=1e-5)
    values, ids = reference[0].topk(4)
    assert [token for token, _ in first.logprobs.top] == ids.tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert silent.logprobs is None
    assert last.logprobs is not None
    assert last.logprobs.top == ()
    assert last.logprobs.logprob == pytest.approx(float(reference[2, last.token]), abs=1e-5)


def test_an_impossible_token_has_a_finite_log_probability() -> None:
    raw = RawLogprobs(torch.tensor([[0.0, float("-inf")]]), {0: 2})
    logprobs = raw.of(0, raw.read(torch.tensor([0])))
    assert logprobs is not None
    assert logprobs.top == ((0, 0.0), (1, LOWEST))
