"""What the sampler draws: the right support, the right frequencies, and the same token whatever the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.noise import NoiseKey, gumbel_noise, mixed_keys
from stageline_runtime.sampling.sampler import PREFILTER_SIZE, sample

Draw = tuple[RequestSampling, int]
"""Parameters of a draw, and the position of its token."""


def row(
    *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0, choice: int = 0, position: int = 0
) -> Draw:
    sampling = RequestSampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, choice=choice)
    return sampling, position


def draw(logits: torch.Tensor, rows: list[Draw]) -> torch.Tensor:
    return sample(logits, [sampling for sampling, _ in rows], [position for _, position in rows])


def reference_support(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[int]:
    """Token ids kept by a plain full sort, best first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: top_k or len(order)]
    highest = logits[order[0]] / temperature
    weights = [math.exp(logits[token] / temperature - highest) for token in order]
    kept: list[int] = []
    mass, total = 0.0, math.fsum(weights)
    for token, weight in zip(order, weights, strict=True):
        if kept and top_p < 1.0 and mass >= top_p * total:
            break
        kept.append(token)
        mass += weight
    return kept


def reference_token(logits: list[float], row: Draw) -> int:
    """The kept token with the largest logit / temperature + noise."""
    parameters, position = row
    kept = reference_support(logits, parameters.temperature, parameters.top_k, parameters.top_p)
    noise = gumbel_noise(mixed_keys([NoiseKey(parameters.seed, parameters.choice, position)]), torch.tensor([kept]))
    scores = [
        logits[token] / parameters.temperature + float(value) for token, value in zip(kept, noise[0], strict=True)
    ]
    return kept[scores.index(max(scores))]


# Eighths tie often, as bfloat16 logits do, and are exact in float32.
eighths = st.integers(-64, 64).map(lambda value: value / 8)
top_ps = st.one_of(st.just(1.0), st.floats(0.01, 0.999))


@given(
    logits=st.lists(eighths, min_size=1, max_size=40),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 50),
    top_p=top_ps,
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 10_000),
)
def test_token_is_that_of_a_plain_full_sort(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> None:
    parameters = row(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, position=position)
    drawn = draw(torch.tensor([logits], dtype=torch.float32), [parameters])
    assert drawn.tolist() == [reference_token(logits, parameters)]


@given(
    flatness=st.sampled_from([0.0, 0.01, 0.3, 3.0]),
    top_k=st.sampled_from([0, 1, PREFILTER_SIZE - 1, PREFILTER_SIZE, PREFILTER_SIZE + 1, 600, 1000, 2000]),
    top_p=st.sampled_from([0.001, 0.2, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 1000),
)
def test_prefilter_changes_nothing_in_a_large_vocabulary(flatness: float, top_k: int, top_p: float, seed: int) -> None:
    """From one peak to fully flat, where far more than the prefiltered candidates are kept and all of them tie."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(1000, generator=generator) * flatness * 8).round() / 8
    parameters = row(top_k=top_k, top_p=top_p, seed=seed)
    assert draw(logits[None], [parameters]).tolist() == [reference_token(logits.tolist(), parameters)]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.8), (0.9, 6, 0.9)]
)
def test_frequencies_follow_the_softmax_of_what_is_kept(temperature: float, top_k: int, top_p: float) -> None:
    logits = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0]
    draws = 20_000
    rows = [row(temperature=temperature, top_k=top_k, top_p=top_p, seed=11, position=i) for i in range(draws)]
    counts = torch.bincount(draw(torch.tensor([logits]).expand(draws, -1), rows), minlength=len(logits)).tolist()
    kept = reference_support(logits, temperature, top_k, top_p)
    weights = {token: math.exp(logits[token] / temperature) for token in kept}
    expected = {token: draws * weight / sum(weights.values()) for token, weight in weights.items()}
    assert sum(counts[token] for token in kept) == draws, counts
    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in kept)
    # Quantile 0.999 of chi-square is below 25 for up to 7 degrees of freedom; the seed is fixed, so this can't flake.
    assert chi_square < 25, (chi_square, counts, expected)


def test_consecutive_seeds_positions_and_choices_draw_independently() -> None:
    """Pairs of neighbouring draws from a fair coin fall on all four outcomes alike."""
    draws = 8_000
    for name in ("seed", "position", "choice"):
        rows = [row(**{name: i}) for i in range(draws)]
        tokens = draw(torch.zeros(draws, 2), rows)
        pairs = torch.bincount(tokens[:-1] * 2 + tokens[1:], minlength=4).tolist()
        expected = (draws - 1) / 4
        assert sum((count - expected) ** 2 / expected for count in pairs) < 16.3, (name, pairs)


mixed_rows = st.lists(
    st.builds(
        row,
        temperature=st.sampled_from([0.0, 0.3, 1.0]),
        top_p=top_ps,
        top_k=st.sampled_from([0, 1, 40, 300]),
        seed=st.integers(0, 2**63),
        choice=st.integers(0, 3),
        position=st.integers(0, 4096),
    ),
    min_size=2,
    max_size=6,
)


@given(rows=mixed_rows, logits_seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_batch(rows: list[Draw], logits_seed: int) -> None:
    logits = torch.randn(len(rows), 517, generator=torch.Generator().manual_seed(logits_seed))
    together = draw(logits, rows).tolist()
    assert together == [int(draw(logits[i : i + 1], rows[i : i + 1])) for i in range(len(rows))]
    reverse = draw(logits.flip(0), rows[::-1]).tolist()
    assert together == reverse[::-1]


def test_zero_temperature_takes_the_best_token_beside_sampled_rows() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    rows = [row(temperature=0.0 if i % 2 else 1.0, seed=i) for i in range(6)]
    tokens = draw(logits, rows)
    assert tokens[1::2].tolist() == logits.argmax(-1)[1::2].tolist()


@pytest.mark.parametrize("vocab_size", [150_001])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "spread"),
    [
        (0.6, 0, 0.95, 3.0),
        (1.0, 3000, 0.9, 1.0),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in ((1.0, 0, 1.0, 3.0), (1.0, 0, 0.5, 2.0), (2.0, 0, 0.9, 1.0))
        ),
    ],
)
def test_a_real_vocabulary_is_sampled_as_by_a_full_sort(
    vocab_size: int, temperature: float, top_k: int, top_p: float, spread: float
) -> None:
    """Also where thousands of tokens are kept, and the draw from all of them lands outside."""
    seeds = range(2)
    logits = torch.randn(len(seeds), vocab_size, generator=torch.Generator().manual_seed(5)) * spread
    rows = [row(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, position=seed) for seed in seeds]
    expected = [reference_token(logits[seed].tolist(), rows[seed]) for seed in seeds]
    assert draw(logits, rows).tolist() == expected


def test_noise_of_a_vocabulary_is_independent_and_standard() -> None:
    """Blocks share a hash, yet each token's uniform is uniform and neighbours, in a block or not, don't go together."""
    draws, num_tokens = 4000, 80
    keys = mixed_keys([NoiseKey(1, 0, position) for position in range(draws)])
    noise = gumbel_noise(keys, torch.arange(num_tokens).expand(draws, -1))
    uniform = (-noise).exp().neg().exp()
    tenths = torch.stack([torch.bincount(column, minlength=10) for column in (uniform * 10).long().T])
    chi_square = ((tenths - draws / 10) ** 2 / (draws / 10)).sum(dim=1)
    # 9 degrees of freedom: mean 9, quantile 0.999999 is 45; the mean over 80 tokens stays near 9.
    assert float(chi_square.max()) < 45, chi_square
    assert abs(float(chi_square.mean()) - 9) < 2, chi_square.mean()
    correlation = torch.corrcoef(uniform.T) - torch.eye(num_tokens)
    # Standard deviation 1 / sqrt(draws) = 0.016; 3160 pairs.
    assert float(correlation.abs().max()) < 0.08, float(correlation.abs().max())
    winners = torch.bincount(noise.argmax(dim=1), minlength=num_tokens)
    expected = draws / num_tokens
    assert float(((winners - expected) ** 2 / expected).sum()) < 130, winners


def test_of_equal_logits_zero_temperature_takes_the_first() -> None:
    logits = torch.full((4, 1000), -3.0)
    logits[0, [70, 71, 999]] = 2.0
    logits[1, :] = float("-inf")
    logits[2, 1:] = float("-inf")
    logits[3, 999] = -2.0
    assert draw(logits, [row(temperature=0.0)] * 4).tolist() == [70, 0, 0, 999]
    assert draw(logits[:, 1:], [row(temperature=0.0)] * 4).tolist() == [69, 0, 0, 998]  # not contiguous


def test_no_rows_give_no_tokens() -> None:
    assert draw(torch.empty(0, 10), []).tolist() == []


def test_noise_never_changes_between_versions() -> None:
    """A resumed stream draws the noise that the broken one would have drawn, also after an upgrade."""
    noise = gumbel_noise(mixed_keys([NoiseKey(seed=42, choice=1, position=7)]), torch.tensor([[0, 1, 49_151]]))
    assert noise.tolist()[0] == pytest.approx(EXPECTED_NOISE, abs=1e-12)


EXPECTED_NOISE = [0.8304993707920281, -0.5388155064947047, 1.646647601404843]
