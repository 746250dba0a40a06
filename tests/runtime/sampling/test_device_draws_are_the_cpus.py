"""What a device keeps and draws, by bisection, is what the CPU's sampler keeps and draws from the same logits."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.device_sampler import sample_on_device
from stageline_runtime.sampling.device_truncation import kept_tokens
from stageline_runtime.sampling.sampler import sample, truncation_of
from stageline_runtime.sampling.truncation import kept_candidates, ordered_candidates

eighths = st.integers(-64, 64).map(lambda value: value / 8)
"""They tie often, as bfloat16 logits do, and are exact in float32."""
parameters = st.builds(
    RequestSampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    top_k=st.integers(0, 12),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
    seed=st.integers(0, 1 << 40),
    choice=st.integers(0, 3),
)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(eighths, min_size=1, max_size=40),
    masked=st.sets(st.integers(0, 39)),
    rows=st.lists(parameters, min_size=1, max_size=4),
)
def test_small_vocabularies_with_many_ties(logits: list[float], masked: set[int], rows: list[RequestSampling]) -> None:
    values = [float("-inf") if token in masked else value for token, value in enumerate(logits)]
    if not any(value > float("-inf") for value in values):
        values[0] = 0.0
    table = torch.tensor([values] * len(rows))
    positions = list(range(len(rows)))
    drawn = sample_on_device(table.clone(), rows, positions, torch.clone)
    assert drawn.tolist() == sample(table, rows, positions).tolist()


@pytest.mark.parametrize("size", [1_000, 49_152])
def test_whole_vocabularies(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = [
        RequestSampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=size, choice=0)
        for temperature, top_p, top_k, min_p in product((0.7, 1.5), (0.5, 0.95, 1.0), (0, 40, 700), (0.0, 0.05))
    ]
    logits = (torch.randn(len(rows), size, generator=generator) * 4).to(torch.bfloat16).to(torch.float32)
    positions = list(range(len(rows)))
    assert sample_on_device(logits.clone(), rows, positions, torch.clone).tolist() == (
        sample(logits, rows, positions).tolist()
    )
    truncation = truncation_of(rows, size)
    order_values, order_ids = ordered_candidates(logits, size)
    expected = torch.zeros_like(logits, dtype=torch.bool).scatter(
        1, order_ids, kept_candidates(logits, order_values, truncation)
    )
    assert torch.equal(kept_tokens(logits, truncation), expected)


def test_both_zeros_are_equal() -> None:
    row = RequestSampling(temperature=1.0, top_p=1.0, top_k=2, seed=1, choice=0)
    logits = torch.tensor([[-0.0, 0.0, 0.0, -1.0]])
    assert kept_tokens(logits, truncation_of([row], 4)).tolist() == [[True, True, False, False]]


def test_rows_without_a_limit_are_drawn_as_they_are_alone() -> None:
    """The others of their batch alone pay for top-p, and nobody's token changes."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 512, generator=generator)
    free = RequestSampling(temperature=1.0, top_p=1.0, top_k=0, seed=5, choice=0)
    limited = RequestSampling(temperature=1.0, top_p=0.5, top_k=0, seed=5, choice=0)
    greedy = RequestSampling(temperature=0.0, top_p=0.1, top_k=1, seed=5, choice=0)
    together = sample_on_device(logits.clone(), [free, limited, greedy], [3, 3, 3], torch.clone)
    alone = [sample_on_device(logits[at : at + 1].clone(), [row], [3], torch.clone) for at, row in
             enumerate((free, limited, greedy))]  # fmt: skip
    assert together.tolist() == torch.cat(alone).tolist()
