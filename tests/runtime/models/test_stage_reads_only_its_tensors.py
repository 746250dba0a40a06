"""A stage reads its own tensors and no others, and says which tensor of which file is wrong."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracles.planning_models import weight_bytes
from oracles.tiny_models import write_tiny_llama
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig, read_model_config
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.models.weights.checkpoint import WeightsError
from stageline_runtime.models.weights.stage_weights import LayerWeights, StageWeights

FIRST = LayerRange(first=0, last=1)
LAST = LayerRange(first=2, last=3)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path, tie_word_embeddings=False)


@dataclass
class Loaded:
    embedding: torch.Tensor | None
    layers: list[LayerWeights]
    head: torch.Tensor | None


def load(model_dir: Path, config: ModelConfig, layers: LayerRange, progress: list[tuple[int, int]]) -> Loaded:
    """Read everything a stage with these layers reads."""
    is_first, is_last = layers.first == 0, layers.last == config.num_layers - 1
    shape = StageShape(
        layers=layers,
        is_first=is_first,
        is_last=is_last,
        dtype=torch.float32,
        num_cohorts=1,
        num_slots=1,
        slot_tokens=1,
    )
    weights = StageWeights(model_dir, config, shape, lambda loaded, total: progress.append((loaded, total)))
    embedding = weights.embedding() if is_first else None
    layer_weights = list(weights.layers())
    if is_last:
        weights.final_norm()
    return Loaded(embedding, layer_weights, weights.head(embedding) if is_last else None)


def split_into_shards(model_dir: Path) -> dict[str, Path]:
    """Put each layer, the embedding and the rest into files of their own; returns where each tensor went."""
    tensors = load_file(model_dir / "model.safetensors")
    weight_map = {}
    for name in tensors:
        parts = name.split(".")
        weight_map[name] = f"part-{parts[2] if 'layers' in parts else parts[-2]}.safetensors"
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, model_dir / file)
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {name: model_dir / file for name, file in weight_map.items()}


def test_progress_ends_at_the_bytes_that_are_counted(model_dir: Path) -> None:
    config = read_model_config(model_dir)
    progress: list[tuple[int, int]] = []
    load(model_dir, config, FIRST, progress)
    total = weight_bytes(config, FIRST, is_first=True, is_last=False, element_bytes=4)
    assert progress[-1] == (total, total)
    assert [loaded for loaded, _ in progress] == sorted({loaded for loaded, _ in progress})


def test_shards_of_other_stages_are_never_opened(model_dir: Path) -> None:
    config = read_model_config(model_dir)
    whole = load(model_dir, config, FIRST, [])
    file_of = split_into_shards(model_dir)
    for name, path in file_of.items():
        if name.startswith(("model.layers.2", "model.layers.3", "lm_head", "model.norm")):
            path.write_bytes(b"not a safetensors file")
    sharded = load(model_dir, config, FIRST, [])
    queries = [loaded.layers[1].fused(loaded.layers[1].layer.query).weight for loaded in (whole, sharded)]
    assert torch.equal(*queries)
    with pytest.raises(WeightsError, match=r"part-2\.safetensors"):
        load(model_dir, config, LAST, [])


def test_both_ends_hold_the_tied_matrix(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path)
    config = read_model_config(model_dir)
    first, last = load(model_dir, config, FIRST, []), load(model_dir, config, LAST, [])
    assert first.embedding is not None
    assert last.head is not None
    assert torch.equal(first.embedding, last.head)


def rewrite(model_dir: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), model_dir / "model.safetensors")


def test_a_missing_tensor_is_named_with_its_file(model_dir: Path) -> None:
    rewrite(model_dir, "model.layers.1.mlp.up_proj.weight", None)
    with pytest.raises(WeightsError) as refusal:
        load(model_dir, read_model_config(model_dir), FIRST, [])
    assert "tensor model.layers.1.mlp.up_proj.weight is missing from" in refusal.value.message
    assert "model.safetensors" in refusal.value.message
    assert refusal.value.exit_code == 65


def test_a_misshapen_tensor_is_named_before_any_data_is_read(model_dir: Path) -> None:
    rewrite(model_dir, "model.layers.3.self_attn.k_proj.weight", torch.zeros(3, 64))
    progress: list[tuple[int, int]] = []
    with pytest.raises(WeightsError) as refusal:
        load(model_dir, read_model_config(model_dir), LAST, progress)
    assert "model.layers.3.self_attn.k_proj.weight" in refusal.value.message
    assert "[3, 64]; config.json asks for [32, 64]" in refusal.value.message
    assert progress == []


def test_a_directory_without_weights_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        load(model_dir, read_model_config(model_dir), FIRST, [])


def test_a_broken_index_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(WeightsError, match="weight_map must be an object"):
        load(model_dir, read_model_config(model_dir), FIRST, [])
