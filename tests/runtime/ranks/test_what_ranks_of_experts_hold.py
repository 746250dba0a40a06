"""A rank reads its own experts alone, which is what is counted for it; what can't be cut is refused in a sentence."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.planning_models import small_llama, weight_bytes
from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.thread_ranks import ThreadRanks
from oracles.tiny_models import (
    write_tiny_granite,
    write_tiny_llama,
    write_tiny_mixtral,
    write_tiny_qwen2_moe,
    write_tiny_qwen3_moe,
)
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import UnsupportedModelError, read_model_config
from stageline_runtime.model_facts.rank_cut import expert_cut
from stageline_runtime.models.families import build_any_stage_model, device_builder
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.planning.memory import LargestStep

FLOAT32_BYTES = 4

MODELS: dict[str, Callable[[Path], Path]] = {
    "mixtral": write_tiny_mixtral,
    "stacked mixtral": partial(write_tiny_mixtral, stacked=True),
    "qwen3_moe": partial(write_tiny_qwen3_moe, mlp_only_layers=[1]),
    "stacked qwen2_moe": partial(write_tiny_qwen2_moe, stacked=True, tie_word_embeddings=True),
}


def _shape(num_layers: int = 4, **fields: Any) -> StageShape:
    whole: dict[str, Any] = {"layers": LayerRange(first=0, last=num_layers - 1), "is_first": True, "is_last": True}
    cache = {"num_cohorts": 1, "num_slots": 2, "slot_tokens": 32}
    return StageShape(dtype=torch.float32, **whole | cache | fields)


def _quiet(_loaded: int, _total: int) -> None:
    pass


@pytest.mark.parametrize(("is_first", "is_last"), [(True, False), (False, True)])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_reads_what_is_counted_for_it(
    model: str, size: int, is_first: bool, is_last: bool, tmp_path: Path
) -> None:
    model_dir = MODELS[model](tmp_path)
    config, layers = read_model_config(model_dir), LayerRange(first=1, last=2)
    shape = _shape(layers=layers, is_first=is_first, is_last=is_last)
    counted = partial(weight_bytes, config, layers, is_first=is_first, is_last=is_last, element_bytes=FLOAT32_BYTES)
    read: list[tuple[int, int]] = []
    for end in ThreadRanks(size).ranks:
        build_any_stage_model(model_dir, config, shape, lambda *done: read.append(done), experts=end)
        assert read[-1] == (counted(experts=size), counted(experts=size))
    assert config.mixture is not None
    of_others = config.mixture.num_experts // size * (size - 1)
    sparse_layers = sum(config.mixture.sparse_layers[1:3])
    expert = 3 * config.hidden_size * config.mixture.intermediate_size
    assert counted() - counted(experts=size) == FLOAT32_BYTES * sparse_layers * of_others * expert


def test_ranks_hold_every_expert_once(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_qwen3_moe(tmp_path))
    assert [list(expert_cut(config, rank, 4).experts) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        expert_cut(config, 4, 4)


def test_the_largest_step_brings_the_rows_of_all_ranks_to_the_experts(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_mixtral(tmp_path))
    assert config.mixture is not None
    step = partial(LargestStep(tokens=8, rows=4).bytes_of, config, is_last=False, element_bytes=4)
    picked = config.mixture.experts_per_token * (3 * config.mixture.intermediate_size + config.hidden_size)
    for size in (2, 4):
        assert step(experts=size) - step() == 8 * 4 * (size * (2 * config.hidden_size + picked) - picked)
    assert LargestStep(tokens=8, rows=4).bytes_of(small_llama(3), is_last=False, element_bytes=4) > 0


@pytest.mark.parametrize(
    ("write", "size", "said"),
    [
        (write_tiny_mixtral, 3, "the model's 4 experts a layer can't be divided among 3 ranks"),
        (write_tiny_mixtral, 8, "the model's 4 experts a layer can't be divided among 8 ranks"),
        (write_tiny_llama, 2, "model_type 'llama' has no experts in any layer that could be cut over 2 ranks"),
        (write_tiny_granite, 2, "runs through Hugging Face's layers, whose experts can't be cut over 2 ranks"),
    ],
)
def test_what_has_no_experts_to_divide_is_refused(
    write: Callable[[Path], Path], size: int, said: str, tmp_path: Path
) -> None:
    config = read_model_config(write(tmp_path))
    with pytest.raises(UnsupportedModelError, match=said):
        build_any_stage_model(tmp_path, config, _shape(), _quiet, experts=ThreadRanks(size).ranks[0])


def test_layers_and_experts_are_not_cut_at_once(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_mixtral(tmp_path))
    tensor, experts = ThreadRanks(2).ranks[0], ThreadRanks(4).ranks[0]
    with pytest.raises(UnsupportedModelError, match="its layers over 2 ranks and its experts over 4 ranks at once"):
        build_any_stage_model(tmp_path, config, _shape(), _quiet, tensor, experts=experts)


def test_a_device_refuses_experts_of_sizes_that_it_has_no_products_for(tmp_path: Path) -> None:
    model_dir = write_tiny_mixtral(tmp_path, intermediate_size=45)
    build = device_builder(ImmediateAccelerator(), PlainAttention)
    with pytest.raises(UnsupportedModelError, match="inner size of an expert is 45 elements of 4 bytes"):
        build(model_dir, read_model_config(model_dir), _shape(), _quiet)
