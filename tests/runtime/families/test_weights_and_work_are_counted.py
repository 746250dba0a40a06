"""What sizing and the cut count as weights is what stages read; of a mixture only the picked experts count as work."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oracles.planning_models import small_llama, weight_bytes
from oracles.tiny_models import (
    add_head,
    write_tiny_cohere2,
    write_tiny_gemma2,
    write_tiny_granite,
    write_tiny_llama,
    write_tiny_mixtral,
    write_tiny_olmo2,
    write_tiny_phi3,
    write_tiny_qwen2,
    write_tiny_qwen2_moe,
    write_tiny_qwen3,
    write_tiny_qwen3_moe,
)
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import (
    ModelConfig,
    UnsupportedModelError,
    read_model_config,
    require_sizes,
)
from stageline_runtime.model_facts.model_shapes import layer_size
from stageline_runtime.models.families import build_any_stage_model
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.planning.cut import DECODE_ROWS, estimate_costs
from stageline_runtime.planning.memory import GroupMemory, LargestStep, StageRoom

MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen2": write_tiny_qwen2,
    "qwen3, tied": write_tiny_qwen3,
    "mixtral": write_tiny_mixtral,
    "mixtral, stacked": lambda path: write_tiny_mixtral(path, stacked=True),
    "qwen2_moe, some layers dense": lambda path: write_tiny_qwen2_moe(path, decoder_sparse_step=2),
    "qwen3_moe, some layers dense": lambda path: write_tiny_qwen3_moe(path, decoder_sparse_step=2),
    "gemma2": write_tiny_gemma2,
    "gemma2, whose config leaves it to the family that it is tied": lambda path: without_field(write_tiny_gemma2(path)),
    "gemma2, tied beside another head": lambda path: add_head(write_tiny_gemma2(path), equal=False),
    "gemma2, tied beside an equal head": lambda path: add_head(write_tiny_gemma2(path), equal=True),
    "llama, tied beside another head": lambda path: add_head(write_tiny_llama(path), equal=False),
    "cohere2": write_tiny_cohere2,
    "olmo2": write_tiny_olmo2,
    "phi3": write_tiny_phi3,
}


def without_field(model_dir: Path, name: str = "tie_word_embeddings") -> Path:
    path = model_dir / "config.json"
    fields = json.loads(path.read_text())
    del fields[name]
    path.write_text(json.dumps(fields))
    return model_dir


def bytes_read(model_dir: Path, config: ModelConfig, layers: LayerRange) -> int:
    """Bytes of all tensors that a stage reads in float32."""
    progress = [(0, 0)]
    build_any_stage_model(
        model_dir,
        config,
        StageShape(
            layers=layers,
            is_first=layers.first == 0,
            is_last=layers.last == config.num_layers - 1,
            dtype=torch.float32,
            num_cohorts=1,
            num_slots=1,
            slot_tokens=8,
        ),
        lambda loaded, total: progress.append((loaded, total)),
    )
    loaded, total = progress[-1]
    assert loaded == total
    return total


@pytest.mark.parametrize("name", MODELS)
def test_weight_bytes_are_those_that_a_stage_reads(name: str, tmp_path: Path) -> None:
    model_dir = MODELS[name](tmp_path)
    config = read_model_config(model_dir)
    for first, last in ((0, 0), (1, 2), (3, 3)):
        layers = LayerRange(first=first, last=last)
        ends = {"is_first": first == 0, "is_last": last == 3}
        counted = weight_bytes(config, layers, **ends, element_bytes=4)
        assert counted == bytes_read(model_dir, config, layers), layers


def mixture(**changes: object) -> ModelConfig:
    """A Mixtral of 8 experts of which 2 run: each has 3 * 64 * 128 weights."""
    fields: dict[str, object] = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    return small_llama(4, **fields | changes)


def test_a_token_works_with_its_own_experts_only() -> None:
    attention = 64 * 16 * (4 + 2 + 2) + 64 * 16 * 4
    expert, router = 3 * 64 * 128, 8 * 64
    size = layer_size(mixture(), 0)
    assert size.active == attention + router + 2 * expert
    assert [size.held(ranks) for ranks in (1, 4)] == [attention + router + n * expert + 2 * 64 for n in (8, 2)]


def test_a_cut_counts_the_experts_that_a_decode_step_reads() -> None:
    config = mixture()
    read = round(8 * (1 - (1 - 2 / 8) ** DECODE_ROWS) * 3 * 64 * 128)
    own = layer_size(config, 0).active - 2 * 3 * 64 * 128
    assert estimate_costs(config).layer == pytest.approx(own + read, abs=1)
    assert estimate_costs(small_llama(4)).layer == layer_size(small_llama(4), 0).active


def test_more_rows_read_more_experts_up_to_all() -> None:
    one, few, many = (layer_size(mixture(), 0).read_experts(rows) for rows in (1, 4, 1000))
    assert one == 2 * 3 * 64 * 128
    assert one < few < many == 8 * 3 * 64 * 128


def test_layers_that_differ_are_each_counted_and_planned_for_at_their_largest() -> None:
    changes = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128, "mlp_only_layers": [1]}
    config = mixture(**changes)
    dense, sparse = (layer_size(config, layer).held() for layer in (1, 0))
    assert dense < sparse
    whole = weight_bytes(config, LayerRange(first=0, last=1), is_first=False, is_last=False, element_bytes=2)
    assert whole == 2 * (dense + sparse)
    memory = GroupMemory(
        config=config,
        rooms=(StageRoom(host="a", available_bytes=0),),
        max_model_len=1,
        largest_step=LargestStep(tokens=1, rows=1),
        element_bytes=2,
    )
    (one,), (two,) = (memory.stages_by_count([count]) for count in (1, 2))
    assert two.weight_bytes - one.weight_bytes == 2 * sparse
    (exact,) = memory.stages_of([LayerRange(first=0, last=1)])
    assert two.weight_bytes - exact.weight_bytes == 2 * (sparse - dense)
    of_dense, of_sparse = layer_size(config, 1), layer_size(config, 0)
    read = of_sparse.matrices + of_sparse.read_experts(DECODE_ROWS)
    assert estimate_costs(config).layer == (of_dense.active + 3 * read) / 4


def test_a_covered_model_without_its_checkpoint_has_no_sizes(tmp_path: Path) -> None:
    model_dir = write_tiny_granite(tmp_path)
    assert require_sizes(read_model_config(model_dir)).measured is not None
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"'granite': config\.json alone doesn't tell the size"):
        require_sizes(read_model_config(model_dir))
