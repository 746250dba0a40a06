"""Logit bias, penalties and min-p against Hugging Face's processors and plain arithmetic."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.adjustments import SeenTokens, adjust
from stageline_runtime.sampling.noise import NoiseKey, gumbel_noise, mixed_keys
from stageline_runtime.sampling.sampler import sample

VOCAB_SIZE = 40
GREEDY = RequestSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0)
token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=120)


def seen_tokens(prompt: list[int], output: list[int]) -> SeenTokens:
    seen = SeenTokens()
    seen.add_prompt(prompt)
    seen.add_output(output)
    return seen


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


def test_a_request_without_penalties_needs_no_history() -> None:
    assert not GREEDY.has_penalties
    logits = logits_of(0)
    before = logits.clone()
    adjust(logits, GREEDY, None)
    assert logits.equal(before)


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=80),
    output=token_lists,
    penalty=st.floats(0.1, 10),
)
def test_repetition_penalty_is_that_of_hugging_face(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = logits_of(len(output))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None].clone())[0]
    adjust(logits, RequestSampling(0.0, 1.0, 0, 0, 0, repetition_penalty=penalty), seen_tokens(prompt, output))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@given(prompt=token_lists, output=token_lists, frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_frequency_and_presence_count_output_alone(
    prompt: list[int], output: list[int], frequency: float, presence: float
) -> None:
    logits = logits_of(1)
    counts = Counter(output)
    expected = [
        float(logit) - counts[token] * frequency - (presence if counts[token] else 0.0)
        for token, logit in enumerate(logits)
    ]
    sampling = RequestSampling(0.0, 1.0, 0, 0, 0, frequency_penalty=frequency, presence_penalty=presence)
    adjust(logits, sampling, seen_tokens(prompt, output))
    assert logits.tolist() == pytest.approx(expected, abs=1e-4)


def test_bias_comes_before_the_penalties() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0])
    sampling = RequestSampling(
        0.0, 1.0, 0, 0, 0, repetition_penalty=2.0, presence_penalty=0.5, logit_bias=((0, -3.0), (2, 100.0))
    )
    adjust(logits, sampling, seen_tokens([0], [1]))
    assert logits.tolist() == [(1.0 - 3.0) * 2.0, -1.0 * 2.0 - 0.5, 102.0]


@given(
    min_p=st.sampled_from([0.001, 0.02, 0.1, 0.5, 0.99, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    vocab_size=st.sampled_from([40, 1000]),
    seed=st.integers(0, 10_000),
)
def test_min_p_keeps_what_hugging_face_keeps(min_p: float, temperature: float, vocab_size: int, seed: int) -> None:
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    no_inputs = torch.LongTensor(1, 1)
    kept = MinPLogitsWarper(min_p)(no_inputs, (logits.double() / temperature))
    noise = gumbel_noise(mixed_keys([NoiseKey(seed, 0, 5)]), torch.arange(vocab_size)[None])
    row = RequestSampling(temperature=temperature, min_p=min_p, seed=seed)
    assert sample(logits, [row], [5]).tolist() == (kept + noise).argmax(dim=-1).tolist()
