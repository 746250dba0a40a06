"""A stage built for a device gives the CPU stage's tokens: same weights and plans, another cache, table and attention.

The device here is the CPU itself and attention is plain torch; what only a GPU can show is `make gpu-check`'s.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oracles.family_checks import pipeline_tokens
from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.tiny_models import (
    write_tiny_llama,
    write_tiny_mistral,
    write_tiny_olmo2,
    write_tiny_qwen2,
    write_tiny_qwen2_moe,
    write_tiny_qwen3,
    write_tiny_qwen3_moe,
)
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.decoder import DecoderStage, attention_heads, build_stage_model
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.models.layers.step_batch import BatchBounds, Tiling, build_step_batch
from stageline_runtime.models.protocol import LoadProgress, StageShape
from stageline_runtime.plan_bus.messages import PlanRow
from stageline_runtime.plan_bus.step_plan import blocks_of

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": write_tiny_llama,
    "qwen2": write_tiny_qwen2,
    "qwen3": write_tiny_qwen3,
    "mistral, window 5": lambda path: write_tiny_mistral(path, sliding_window=5),
    "olmo2": write_tiny_olmo2,
    "qwen2_moe": write_tiny_qwen2_moe,
    "qwen3_moe": write_tiny_qwen3_moe,
}
USUAL = ("llama", "mistral, window 5")


def build(model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress) -> DecoderStage:
    attention = PlainAttention(attention_heads(config))
    return build_stage_model(
        model_dir, config, shape, progress, accelerator=ImmediateAccelerator(), attention=attention
    )


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.soak) for name in MODELS]
)
def test_two_stages_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    model_dir = MODELS[name](tmp_path)
    assert pipeline_tokens(model_dir, 2, build) == pipeline_tokens(model_dir, 2)


def test_a_cache_made_anew_after_loading_is_as_good(tmp_path: Path) -> None:
    """Stages load with little cache, and make theirs once they know what is left."""
    model_dir = write_tiny_llama(tmp_path)
    made: list[int] = []

    def build_twice(model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress) -> DecoderStage:
        stage = build(model_dir, config, replace(shape, num_blocks=1), progress)
        stage.reserve_cache(shape.num_slots * blocks_of(shape.slot_tokens))
        made.append(shape.num_slots)
        return stage

    assert pipeline_tokens(model_dir, 2, build_twice) == pipeline_tokens(model_dir, 2)
    assert len(made) == 2


SPLIT = Tiling(tile_tokens=16, spare_parts=264, least_part_tokens=64)
BOUNDS = BatchBounds(num_slots=4, slot_tokens=16, tiling=Tiling(tile_tokens=3, spare_parts=8, least_part_tokens=64))
LONG_BOUNDS = BatchBounds(num_slots=65, slot_tokens=32_768, tiling=SPLIT)


def row(slot: int, position: int, num_tokens: int) -> PlanRow:
    return PlanRow(slot, 1, position, num_tokens, (), need_sample=True)


def test_the_table_of_single_tokens_depends_on_the_padded_size_alone() -> None:
    few = build_step_batch([row(2, 7, 1)], 4, BOUNDS)
    many = build_step_batch([row(0, 1, 1), row(3, 2, 1), row(1, 15, 1)], 4, BOUNDS)
    assert few.tokens == ((2, 7), (-1, 0), (-1, 0), (-1, 0))
    assert few.decode_tiles == ((0, 1, 2, 7), (1, 1, -1, 0), (2, 1, -1, 0), (3, 1, -1, 0))
    assert len(few.flat()) == len(many.flat()) == 4 * 8
    assert few.padded_to(8).flat()[: 4 * 2] == few.flat()[: 4 * 2]


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param([0], id="one token"),
        pytest.param([32_767], id="one long row"),
        pytest.param([1_023] * 64, id="equal rows"),
        pytest.param([1_023] * 40 + [32_767] + [5] * 24, id="a long row among short ones"),
        pytest.param([32_767] * 65, id="long rows only"),
    ],
)
def test_each_row_is_split_by_its_own_length(positions: list[int]) -> None:
    rows = [row(slot, position, 1) for slot, position in enumerate(positions)]
    step = build_step_batch(rows, 72, LONG_BOUNDS)
    ends = [before for before, _ in step.decode_parts[1:]]
    spare = [end - before for end, (before, _) in zip(ends, step.decode_parts, strict=False)]
    assert all((count + 1) * step.part_tokens > position for count, position in zip(spare, positions, strict=False))
    assert all(count * step.part_tokens <= position for count, position in zip(spare, positions, strict=False))
    assert sum(spare) <= SPLIT.spare_parts
    total = sum(positions) + len(positions)
    assert step.part_tokens in (64, *range(total // 264, 2 * total // 264 + 2))


def test_the_parts_of_a_row_depend_on_neither_order_nor_padding() -> None:
    rows = [row(0, 9_000, 1), row(1, 100, 1), row(2, 1_500, 1)]
    one, other = build_step_batch(rows, 3, LONG_BOUNDS), build_step_batch(rows[::-1], 64, LONG_BOUNDS)
    assert one.part_tokens == other.part_tokens == one.padded_to(128).part_tokens
    assert one.padded_to(128).decode_parts[:3] == one.decode_parts
    assert build_step_batch([*rows, row(3, 0, 500)], 1024, LONG_BOUNDS).part_tokens == one.part_tokens
