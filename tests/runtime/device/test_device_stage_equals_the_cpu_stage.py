"""A stage built for a device gives the CPU stage's tokens: same weights and plans, another cache, table and attention.

The device here is the CPU itself and attention is plain torch; what only a GPU can show is `make gpu-check`'s.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracles.family_checks import pipeline_tokens
from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.tiny_models import (
    write_tiny_llama,
    write_tiny_mistral,
    write_tiny_qwen2,
    write_tiny_qwen2_moe,
    write_tiny_qwen3,
    write_tiny_qwen3_moe,
)
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig, read_model_config
from stageline_runtime.models.device.attention import PlainAttention
from stageline_runtime.models.device.stage import DeviceStage, attention_heads, build_device_stage
from stageline_runtime.models.device.step_rows import CacheBounds, build_step_rows
from stageline_runtime.models.protocol import LoadProgress, StageShape
from stageline_runtime.plan_bus.messages import PlanRow, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": write_tiny_llama,
    "qwen2": write_tiny_qwen2,
    "qwen3": write_tiny_qwen3,
    "mistral, window 5": lambda path: write_tiny_mistral(path, sliding_window=5),
    "qwen2_moe": write_tiny_qwen2_moe,
    "qwen3_moe": write_tiny_qwen3_moe,
}
USUAL = ("llama", "mistral, window 5")


def build(model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress) -> DeviceStage:
    attention = PlainAttention(attention_heads(config, shape))
    return build_device_stage(model_dir, config, shape, progress, ImmediateAccelerator(), attention)


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS]
)
def test_two_stages_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    model_dir = MODELS[name](tmp_path)
    assert pipeline_tokens(model_dir, 2, build) == pipeline_tokens(model_dir, 2)


def test_a_cache_made_anew_after_loading_is_as_good(tmp_path: Path) -> None:
    """Stages load with little cache, and make theirs once they know what is left."""
    model_dir = write_tiny_llama(tmp_path)
    made: list[int] = []

    def build_twice(model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress) -> DeviceStage:
        stage = build(model_dir, config, replace(shape, num_blocks=1), progress)
        stage.reserve_cache(shape.num_slots * blocks_of(shape.slot_tokens))
        made.append(shape.num_slots)
        return stage

    assert pipeline_tokens(model_dir, 2, build_twice) == pipeline_tokens(model_dir, 2)
    assert len(made) == 2


BOUNDS = CacheBounds(num_slots=4, slot_tokens=16, tile_tokens=3)


def row(slot: int, position: int, num_tokens: int) -> PlanRow:
    return PlanRow(slot, 1, position, num_tokens, (), need_sample=True)


def test_the_table_of_single_tokens_depends_on_the_padded_size_alone() -> None:
    few = build_step_rows([row(2, 7, 1)], 4, BOUNDS)
    many = build_step_rows([row(0, 1, 1), row(3, 2, 1), row(1, 15, 1)], 4, BOUNDS)
    assert few.tokens == ((2, 7), (-1, 0), (-1, 0), (-1, 0))
    assert few.decode_tiles == ((0, 1, 2, 7), (1, 1, -1, 0), (2, 1, -1, 0), (3, 1, -1, 0))
    assert len(few.flat()) == len(many.flat()) == 4 * 6
    assert few.padded_to(8).flat()[: 4 * 2] == few.flat()[: 4 * 2]


def test_chunks_become_tiles_between_single_tokens() -> None:
    rows = build_step_rows([row(0, 4, 1), row(1, 2, 7), row(2, 0, 1)], 10, BOUNDS)
    assert rows.prefill_tiles == ((1, 3, 1, 2), (4, 3, 1, 5), (7, 1, 1, 8))
    assert rows.decode_tiles == ((0, 1, 0, 4), (8, 1, 2, 0), (9, 1, -1, 0))
    assert rows.tokens[1:8] == tuple((1, position) for position in range(2, 9))


@pytest.mark.parametrize(
    ("bad", "padded"),
    [
        pytest.param(row(4, 0, 1), 1, id="slot past the cache"),
        pytest.param(row(0, 10, 7), 8, id="past the slot"),
        pytest.param(row(0, 0, 5), 4, id="more tokens than the plan is padded to"),
    ],
)
def test_rows_that_do_not_fit_are_refused(bad: PlanRow, padded: int) -> None:
    with pytest.raises(ValueError, match=r"slot|tokens"):
        build_step_rows([bad], padded, BOUNDS)


def test_a_copied_slot_goes_on_as_its_source_does(tmp_path: Path) -> None:
    """In the middle of a block, after other slots have taken and given back blocks."""
    model_dir = write_tiny_llama(tmp_path)
    config = read_model_config(model_dir)
    layers = LayerRange(first=0, last=config.num_layers - 1)
    shape = StageShape(
        layers=layers,
        is_first=True,
        is_last=True,
        dtype=torch.float32,
        num_cohorts=1,
        slots_per_cohort=3,
        slot_tokens=64,
        num_blocks=7,
    )
    stage = build(model_dir, config, shape, lambda *_: None)

    def run(*rows: PlanRow) -> torch.Tensor:
        count = sum(row.num_tokens for row in rows)
        plan = StepPlan(0, 0, (), rows, count, -1, feedback_posted=False, dummy=False)
        ids = torch.tensor([(7 * position) % 50 for row in rows for position in range(row.num_tokens)])
        return stage.layers(stage.embed(ids), stage.attention_batch(plan))

    run(row(1, 0, 40))
    run(row(0, 0, 37))
    stage.trim_slot(1, 20)
    stage.reset_slot(2)
    stage.copy_slot(0, 2, 21)
    alone = run(row(0, 21, 5))
    stage.trim_slot(0, 0)
    run(row(1, 20, 12))
    torch.testing.assert_close(run(row(2, 21, 5)), alone)
