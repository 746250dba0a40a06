"""Logits that ranks compute in parts and gather are those of one rank, and so are the tokens drawn from them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oracles.thread_ranks import RankedStage, ThreadRanks
from oracles.tiny_models import write_tiny_llama
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.model_facts.rank_cut import rank_cut
from stageline_runtime.models.cpu.row_modules import OutputHead
from stageline_runtime.plan_bus.messages import RequestSampling
from stageline_runtime.sampling.sampler import sample

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
