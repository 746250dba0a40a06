"""Logits that ranks compute in parts are those of one rank, and so are the tokens: drawn from all of them, gathered, or
by each rank from its part.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from oracles.thread_ranks import RankedStage, ThreadRanks
from oracles.tiny_models import write_tiny_llama
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.model_facts.rank_cut import rank_cut
from stageline_runtime.models.layers.row_modules import OutputHead
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SlotFill, StepPlan
from stageline_runtime.sampling.part_draws import (
    OPEN,
    Vocabulary,
    best_of_part,
    best_of_parts,
    candidates_of_part,
    draw_among_parts,
)
from stageline_runtime.sampling.sampler import is_free, sample
from stageline_runtime.stage.step.rank_sampling import PartDraws

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95, "top_k": 40},
]
NUM_ROWS = 2_000


@pytest.mark.parametrize("size", [2, 4])
def test_equal_logits_give_equal_tokens_by_any_option(size: int, tmp_path: Path) -> None:
    """Weights and hidden states are small whole numbers, so that sums are exact, and scores tie often."""
    config = read_model_config(write_tiny_llama(tmp_path, num_kv_heads=4))
    torch.manual_seed(5)
    whole = torch.randint(-3, 4, (config.vocab_size, config.hidden_size)).float()
    hidden = torch.zeros(NUM_ROWS, config.hidden_size)
    hidden[torch.arange(NUM_ROWS), torch.randint(config.hidden_size, (NUM_ROWS,))] = 1.0

    def head_of(group: Any) -> Any:
        rows = rank_cut(config, group.rank, group.size).vocabulary
        weights: Any = SimpleNamespace(
            final_norm=lambda: torch.ones(config.hidden_size), head=lambda _: whole[rows.start : rows.stop].contiguous()
        )
        head = OutputHead(config, weights, None, ranks=group)
        return SimpleNamespace(head=head)

    with ThreadPoolExecutor(size) as pool:
        gathered = RankedStage([head_of(group) for group in ThreadRanks(size).ranks], pool).head(hidden)
    alone = head_of(ThreadRanks(1).ranks[0]).head(hidden)
    assert torch.equal(gathered, alone)
    sampling = [RequestSampling(seed=index, **OPTIONS[index % len(OPTIONS)]) for index in range(NUM_ROWS)]
    positions = [index % 50 for index in range(NUM_ROWS)]
    tokens = sample(gathered, sampling, positions)
    assert torch.equal(tokens, sample(alone, sampling, positions))
    lowest = (alone[0] == alone[0].max()).nonzero()[0].item()
    assert tokens[0] == lowest, "equal scores are settled by the lowest id"
    assert tokens.max() >= config.vocab_size - config.vocab_size // size, "no token of the last rank was drawn"


FREE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.2},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 4.0, "top_k": 9_999},
]


@pytest.mark.parametrize("vocab_size", [64, 269, 4_099])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_free_rows_are_drawn_by_parts_as_from_the_whole(size: int, vocab_size: int) -> None:
    """Wherever the parts begin within the blocks of the noise; many logits are equal."""
    drawn = torch.Generator().manual_seed(vocab_size + size)
    logits = torch.randint(-4, 5, (600, vocab_size), generator=drawn).float()
    rows = [RequestSampling(seed=index, choice=index % 3, **FREE[index % len(FREE)]) for index in range(len(logits))]
    assert all(is_free(row, vocab_size) for row in rows)
    positions = [index % 70 for index in range(len(logits))]
    width = -(-vocab_size // size)
    parts = [
        best_of_part(logits[:, first : first + width].contiguous(), first, rows, positions)
        for first in range(0, vocab_size, width)
    ]
    tokens = best_of_parts(torch.stack(parts))
    assert torch.equal(tokens, sample(logits, rows, positions))
    assert len({int(token) // width for token in tokens}) == size, "tokens of all parts are drawn"


@pytest.mark.parametrize(
    ("option", "expected"),
    [({}, True), ({"top_p": 0.9}, False), ({"top_k": 5}, False), ({"min_p": 0.1}, False), ({"top_k": 269}, True)],
)
def test_what_may_draw_any_token_is_free(option: dict[str, Any], expected: bool) -> None:
    assert is_free(RequestSampling(**option), 269) is expected
    assert is_free(RequestSampling(temperature=0.0, **option), 269)


RESTRICTED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95, "top_k": 40},
    {"temperature": 0.2, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 300},
    {"temperature": 9.0, "top_p": 0.9999},
]


def drawn_by_parts(logits: torch.Tensor, rows: list[RequestSampling], positions: list[int], size: int) -> torch.Tensor:
    vocabulary = Vocabulary(logits.shape[1], -(-logits.shape[1] // size))
    firsts = range(0, vocabulary.size, vocabulary.width)
    parts = [
        candidates_of_part(logits[:, first : first + vocabulary.width].contiguous(), first, rows, vocabulary)
        for first in firsts
    ]
    return draw_among_parts(torch.stack(parts), rows, positions, vocabulary)


@pytest.mark.parametrize(("scale", "is_rounded"), [(3.0, False), (1.0, True), (0.3, False)])
@pytest.mark.parametrize("vocab_size", [64, 269, 513, 4_099])
@pytest.mark.parametrize("size", [2, 4])
def test_restricted_rows_are_drawn_by_parts_as_from_the_whole_or_left_open(
    size: int, vocab_size: int, scale: float, is_rounded: bool
) -> None:
    drawn = torch.Generator().manual_seed(vocab_size + size)
    logits = torch.randn(240, vocab_size, generator=drawn) * scale
    logits = logits.round() if is_rounded else logits
    rows = [RequestSampling(seed=index, **RESTRICTED[index % len(RESTRICTED)]) for index in range(len(logits))]
    positions = [index % 50 for index in range(len(logits))]
    tokens = drawn_by_parts(logits, rows, positions, size)
    is_open = tokens == OPEN
    assert torch.equal(tokens[~is_open], sample(logits, rows, positions)[~is_open])
    if vocab_size <= size * 256:
        assert not is_open.any(), "every token is a candidate"
    else:
        assert is_open[5::6].all(), "most tokens are kept: their best ones don't settle it"
    if scale == 3.0:
        assert (~is_open).sum() >= len(rows) // 2


def test_a_mass_too_close_to_a_border_is_left_open() -> None:
    """Two tokens as likely as each other, and all others out of reach: a top-p of one half ends between them."""
    logits = torch.full((2, 2_000), -200.0)
    logits[:, 3] = logits[:, 1_500] = 5.0
    rows = [RequestSampling(top_p=top_p) for top_p in (0.5, 0.6)]
    tokens = drawn_by_parts(logits, rows, [1, 2], 2).tolist()
    assert tokens[0] == OPEN
    assert tokens[1] == int(sample(logits[1:], rows[1:], [2]))


def _plan(rows: tuple[PlanRow, ...], fills: tuple[SlotFill, ...] = ()) -> StepPlan:
    return StepPlan(0, 0, fills, rows, len(rows), -1, feedback_posted=True, dummy=False)


ASKED = [
    RequestSampling(temperature=0.0),
    RequestSampling(seed=7),
    RequestSampling(seed=3, top_p=0.5),
    RequestSampling(frequency_penalty=0.5),
    RequestSampling(num_top_logprobs=0),
]
ROWS = [PlanRow(slot, 1, 5, 1, (), need_sample=True) for slot in range(len(ASKED))]


def ranks_that_draw(shared: ThreadRanks, vocab_size: int) -> list[PartDraws]:
    """Each has learned from a plan what the requests ask for."""
    fills = tuple(SlotFill(slot, 1, sampling) for slot, sampling in enumerate(ASKED))
    ranks = [PartDraws(end, end.rank * vocab_size // 2, vocab_size) for end in shared.ranks]
    for each in ranks:
        each.accept(_plan((), fills))
    return ranks


def test_ranks_draw_together_the_plans_of_plain_rows_alone() -> None:
    """They know by the fills: a row of another generation, of drafts, or of a request that asks for more is none."""
    first = ranks_that_draw(ThreadRanks(2), 80)[0]
    assert first.rows_of(_plan((ROWS[0], ROWS[1], ROWS[2]))) == ASKED[:3]
    for slot in (3, 4):
        assert first.rows_of(_plan((ROWS[0], ROWS[slot]))) is None, ASKED[slot]
    assert first.rows_of(_plan((msgspec.structs.replace(ROWS[0], generation=2),))) is None
    drafts = msgspec.structs.replace(ROWS[0], num_tokens=2, token_ids=(1, 2), num_drafts=1)
    assert first.rows_of(_plan((drafts,))) is None


@pytest.mark.parametrize(
    ("chosen", "vocab_size", "spread", "operations"),
    [
        ([0, 1], 80, 1.0, ["best of parts"]),
        ([2], 80, 1.0, ["candidates of parts", "drawn tokens"]),
        ([2, 0, 1], 5_000, 4.0, ["best of parts", "candidates of parts", "drawn tokens"]),
        ([0, 2], 5_000, 0.01, ["best of parts", "candidates of parts", "drawn tokens"]),
    ],
    ids=["free", "restricted", "both", "open"],
)
def test_all_ranks_get_the_same_tokens_and_ask_as_the_plan_says(
    chosen: list[int], vocab_size: int, spread: float, operations: list[str]
) -> None:
    shared = ThreadRanks(2)
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(len(chosen), vocab_size, generator=drawn) * spread
    plan, rows = _plan(tuple(ROWS[slot] for slot in chosen)), [ASKED[slot] for slot in chosen]
    parts = logits.chunk(2, dim=1)
    with ThreadPoolExecutor(2) as pool:
        ranks = ranks_that_draw(shared, vocab_size)
        found = list(pool.map(lambda each, part: each.draw(plan, rows, part.contiguous()), ranks, parts))
    is_open = spread < 0.1  # nearly even: half of all tokens are kept
    assert found == [None if is_open else sample(logits, rows, [6] * len(rows)).tolist()] * 2
    assert shared.operations == [f"all-gather, {each}" for each in operations]
