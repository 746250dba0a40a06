"""Real stages of a tiny model in float32, in seeded orders: Hugging Face's token after each context, alone.

The hash model can't show a hidden tensor that a real model writes to again while it is being sent, or a cache that
remembers a slot's former holder.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from chaos.local_group import LocalModel, run_group
from chaos.local_workloads import SLOT_TOKENS, Ask, draw_workload, expected_output
from oracles.in_process_pipeline import build_stages
from oracles.scripted_drafts import Drafting
from oracles.tiny_models import write_tiny_llama

HIDDEN_SIZE = 64
RUNS = 12
Expected = Callable[[Ask], tuple[int, ...]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Tensors this small gain nothing from more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "model", hidden_size=HIDDEN_SIZE)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Expected:
    """What Hugging Face's forward pass over the whole context of one request alone gives."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    @torch.inference_mode()
    def logits_after(context: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([context])).logits[0, -1]
        return logits

    return cache(lambda ask: expected_output(ask, logits_after))


@pytest.mark.parametrize(
    ("num_stages", "slots_per_cohort", "drafting"),
    [
        (2, 2, None),
        (3, 1, Drafting.RANDOM),
        pytest.param(1, 2, Drafting.RANDOM, marks=pytest.mark.thorough),
        *(pytest.param(*sizes, None, marks=pytest.mark.soak) for sizes in ((1, 2), (3, 1), (4, 1))),
    ],
)
def test_a_tiny_llama(
    num_stages: int, slots_per_cohort: int, drafting: Drafting | None, model_dir: Path, expected: Expected
) -> None:
    """The same stages run workload after workload, so that slots hold what earlier ones left."""
    stages = build_stages(
        model_dir, num_stages, dtype=torch.float32, slots_per_cohort=slots_per_cohort, slot_tokens=SLOT_TOKENS
    )
    model = LocalModel(stages=stages, hidden_size=HIDDEN_SIZE, dtype=torch.float32, expected=expected)
    for seed in range(RUNS):
        workload = replace(
            draw_workload(Random(seed), num_stages), slots_per_cohort=slots_per_cohort, drafting=drafting
        )
        try:
            run_group(workload, seed, model)
        except Exception as error:
            error.add_note(f"num_stages {num_stages}, seed {seed}")
            raise
