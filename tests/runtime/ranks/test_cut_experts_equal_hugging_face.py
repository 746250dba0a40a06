"""In float32, a pipeline whose experts are cut over ranks says the greedy tokens of Hugging Face's `generate`."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.expert_ranks import Arrival, ExpertRanks, build_expert_ranks
from oracles.in_process_pipeline import Request
from oracles.pipeline_checks import draw_prompts, hugging_face_tokens
from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.thread_ranks import ThreadRanks, build_ranks
from oracles.tiny_models import VOCAB_SIZE, write_tiny_mixtral, write_tiny_qwen2_moe, write_tiny_qwen3_moe
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig, read_model_config
from stageline_runtime.models.decoder import DecoderStage
from stageline_runtime.models.families import build_any_stage_model, device_builder
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.models.protocol import ModelBuilder, StageShape
from stageline_runtime.plan_bus.messages import StepPlan
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.ranks.rank_area import RankArea
from stageline_runtime.ranks.shared_memory import SharedMemoryRanks

PROMPTS = draw_prompts(10, VOCAB_SIZE, 60)
MAX_TOKENS = [5 + (5 * index) % 9 for index in range(len(PROMPTS))]
SIZES: dict[str, Any] = {"slots_per_cohort": 2, "slot_tokens": 96, "chunk_tokens": 13}

MODELS: dict[str, Callable[[Path], Path]] = {
    "mixtral": write_tiny_mixtral,
    "stacked mixtral": partial(write_tiny_mixtral, stacked=True, num_hidden_layers=2),
    "qwen3_moe": partial(write_tiny_qwen3_moe, mlp_only_layers=[1]),
    "qwen2_moe with a shared expert": partial(write_tiny_qwen2_moe, stacked=True, decoder_sparse_step=2),
}
OTHERS = [name for name in MODELS if name != "qwen3_moe"]


def _spread(size: int) -> list[tuple[int, int]]:
    return [(0, index % size) for index in range(len(PROMPTS))]


def _all_on_one(size: int) -> list[tuple[int, int]]:
    return [(0, size - 1)] * len(PROMPTS)


def _random(size: int) -> list[tuple[int, int]]:
    drawn = random.Random(17 * size)
    return [(drawn.randrange(60), drawn.randrange(size)) for _ in PROMPTS]


def _generate(ranks: ExpertRanks, places: list[tuple[int, int]]) -> list[list[int]]:
    """Tokens of `PROMPTS`, each of which comes before a step to a rank."""
    asked = zip(PROMPTS, MAX_TOKENS, strict=True)
    requests = [Request(list(prompt), length) for prompt, length in asked]
    arriving = zip(places, requests, strict=True)
    ranks.generate([Arrival(step=step, rank=rank, request=request) for (step, rank), request in arriving])
    return [request.output for request in requests]


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("qwen3_moe", 2),
        *(pytest.param(name, 4 if name == "mixtral" else 2, marks=pytest.mark.thorough) for name in OTHERS),
    ],
)
def test_greedy_tokens_are_those_of_hugging_face(model: str, size: int, tmp_path: Path) -> None:
    model_dir = MODELS[model](tmp_path)
    expected = hugging_face_tokens(model_dir, PROMPTS, MAX_TOKENS)
    assert len({token for output in expected for token in output}) > 10, "the model says too little to tell anything"
    for stage_count in (1, 2):
        ranks = build_expert_ranks(model_dir, stage_count, size, **SIZES)
        for places in (_spread(size), _all_on_one(size), _random(size)):
            assert _generate(ranks, places) == expected, f"P={stage_count}, (step, rank) of requests: {places}"
        assert all(ranks.idle_plans), f"no dummy plan on some rank: {ranks.idle_plans}"


def test_experts_are_exchanged_through_shared_memory(tmp_path: Path) -> None:
    def ends_of_stage(size: int) -> list[RankGroup]:
        descriptor = RankArea.create(size, 1 << 14)  # less than the largest exchange, which takes several rounds
        return [SharedMemoryRanks(RankArea(descriptor), rank) for rank in range(size)]

    model_dir = write_tiny_mixtral(tmp_path, num_hidden_layers=2)
    expected = hugging_face_tokens(model_dir, PROMPTS, MAX_TOKENS)
    ranks = build_expert_ranks(model_dir, 2, 2, ends_of_stage=ends_of_stage, **SIZES)
    assert _generate(ranks, _random(2)) == expected


@pytest.mark.parametrize(
    "model", ["qwen3_moe", pytest.param("qwen2_moe with a shared expert", marks=pytest.mark.thorough)]
)
def test_ranks_on_devices_say_the_same(model: str, tmp_path: Path) -> None:
    def builder_of(end: RankGroup) -> ModelBuilder:
        return device_builder(ImmediateAccelerator(), PlainAttention, experts=end)

    model_dir = MODELS[model](tmp_path)
    expected = hugging_face_tokens(model_dir, PROMPTS, MAX_TOKENS)
    ranks = build_expert_ranks(model_dir, 2, 2, builder_of=builder_of, **SIZES)
    assert _generate(ranks, _random(2)) == expected


def _shape(config: ModelConfig) -> StageShape:
    return StageShape(
        layers=LayerRange(first=0, last=config.num_layers - 1),
        is_first=True,
        is_last=True,
        dtype=torch.float32,
        num_cohorts=1,
        num_slots=2,
        slot_tokens=32,
    )


def _quiet(_loaded: int, _total: int) -> None:
    pass


def _builder_of(ranks: RankGroup) -> ModelBuilder:
    return partial(build_any_stage_model, experts=ranks)


def _dummy(padded_tokens: int) -> StepPlan:
    return StepPlan(
        seq=0,
        cohort=0,
        fills=(),
        rows=(),
        padded_tokens=padded_tokens,
        feedback_through=-1,
        feedback_posted=False,
        dummy=True,
    )


def test_layers_with_experts_exchange_twice_by_names_that_say_which(tmp_path: Path) -> None:
    model_dir = write_tiny_qwen3_moe(tmp_path, num_hidden_layers=3, mlp_only_layers=[1])
    config, shared = read_model_config(model_dir), ThreadRanks(2)
    stage = build_ranks(model_dir, config, _shape(config), shared.ranks, _quiet, _builder_of)
    plan = _dummy(4)
    hidden = stage.embed(torch.zeros(plan.padded_tokens, dtype=torch.int64))
    stage.head(stage.layers(hidden, stage.step_batch(plan)))
    assert shared.operations == [
        "all-gather, layer 0, experts",
        "reduce-scatter, layer 0, experts",
        "all-gather, layer 2, experts",
        "reduce-scatter, layer 2, experts",
    ]


def test_what_an_idle_rank_runs_changes_neither_slots_nor_other_ranks_rows(tmp_path: Path) -> None:
    model_dir = write_tiny_qwen2_moe(tmp_path)
    config = read_model_config(model_dir)
    stage = build_ranks(model_dir, config, _shape(config), ThreadRanks(2).ranks, _quiet, _builder_of)
    batch = stage.step_batch(_dummy(4))
    hidden = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(3))
    beside_rows = stage.layers(hidden, batch)
    working, idle = stage.models
    running = stage.start(lambda model: model.layers(hidden.clone() if model is working else hidden * torch.nan, batch))
    assert torch.equal(running[0].result(), beside_rows)
    assert running[1].result().isnan().all()
    for model in (working, idle):
        assert isinstance(model, DecoderStage)
        assert all(not keys[:-1].any() for keys, _ in model._layers._caches)
