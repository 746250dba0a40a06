"""Checkpoints that say less than transformers writes, or name tensors otherwise, run as Hugging Face runs them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracles.family_checks import assert_equals_hugging_face
from oracles.tiny_models import (
    write_tiny_gemma2,
    write_tiny_gpt_neox,
    write_tiny_llama,
    write_tiny_starcoder2,
)
from stageline_runtime.model_facts.foreign_model import read_foreign_model
from stageline_runtime.model_facts.model_config import (
    SUPPORTED_ARCHITECTURES,
    UnsupportedModelError,
    model_config_from_dict,
    read_model_config,
)
from stageline_runtime.model_facts.model_shapes import end_parameters
from stageline_runtime.models.weights.checkpoint import read_tensors
from stageline_runtime.prepare.model_files import check_model_files


def rename_tensors(model_dir: Path, rename: Callable[[str], str]) -> Path:
    """The same tensors under other names."""
    path = model_dir / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    return model_dir


def leave_out_defaults(model_dir: Path) -> Path:
    """`config.json` says only what its class doesn't."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    default = type(config)().to_dict()
    told = {name: each for name, each in config.to_dict().items() if name == "model_type" or default.get(name) != each}
    (model_dir / "config.json").write_text(json.dumps(told), encoding="utf-8")
    return model_dir


def test_gpt_neox_has_its_head_under_the_name_of_before(tmp_path: Path) -> None:
    model_dir = write_tiny_gpt_neox(tmp_path)
    as_written = read_model_config(model_dir)
    rename_tensors(model_dir, lambda name: name.replace("lm_head.", "embed_out."))
    assert any("embed_out" in name for name in load_file(model_dir / "model.safetensors"))
    renamed = read_model_config(model_dir)
    for is_first, is_last in ((True, False), (False, True)):
        counts = [end_parameters(each, is_first=is_first, is_last=is_last) for each in (as_written, renamed)]
        assert counts[0] == counts[1], "the head is no part of the front"
    assert_equals_hugging_face(model_dir)


@pytest.mark.parametrize(
    "write", [write_tiny_llama, pytest.param(write_tiny_gemma2, marks=pytest.mark.soak)], ids=["own", "coverage"]
)
def test_names_without_the_models_prefix_are_found(write: Callable[[Path], Path], tmp_path: Path) -> None:
    model_dir = rename_tensors(write(tmp_path), lambda name: name.removeprefix("model."))
    assert "embed_tokens.weight" in load_file(model_dir / "model.safetensors")
    assert_equals_hugging_face(model_dir)


@pytest.mark.parametrize(
    ("write", "fields", "left_out"),
    [
        # What the tiny model shares with the class is what the config then leaves out.
        pytest.param(
            *(write_tiny_gemma2, {"num_attention_heads": 8, "num_key_value_heads": 4}, "num_key_value_heads"),
            marks=pytest.mark.soak,
        ),
        (write_tiny_starcoder2, {"num_key_value_heads": 2}, "num_key_value_heads"),
    ],
    ids=["gemma2", "starcoder2"],
)
def test_what_a_config_leaves_out_is_as_its_class_has_it(
    write: Callable[..., Path], fields: dict[str, Any], left_out: str, tmp_path: Path
) -> None:
    model_dir = leave_out_defaults(write(tmp_path, **fields))
    assert left_out not in json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    assert_equals_hugging_face(model_dir, stage_counts=(2,))


def test_a_dense_doge_is_not_refused_as_a_mixture() -> None:
    doge = {"model_type": "doge", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "is_moe": False}
    with pytest.raises(UnsupportedModelError) as refusal:
        model_config_from_dict(doge, {})
    assert "keep_window_size 2048 of model_type 'doge' is not supported: attention masks that follow from" in str(
        refusal.value
    )


def test_a_mixture_that_leaves_its_experts_to_the_class_is_refused_as_one() -> None:
    sparse = {"model_type": "flex_olmo", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    with pytest.raises(UnsupportedModelError) as refusal:
        model_config_from_dict(sparse, {})
    assert "num_experts 7 of model_type 'flex_olmo' is not supported" in str(refusal.value)
    assert "serve it with engine.name: vllm" in str(refusal.value)


@pytest.mark.parametrize("has_shards", [True, False])
@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_gemma2], ids=["own", "coverage"])
def test_a_single_file_goes_before_an_index_that_outlived_its_shards(
    write: Callable[[Path], Path], has_shards: bool, tmp_path: Path
) -> None:
    model_dir = write(tmp_path)
    tensors = load_file(model_dir / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    (model_dir / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, shard)}), encoding="utf-8"
    )
    if has_shards:
        before = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        save_file(before, model_dir / shard, metadata={"format": "pt"})
    check_model_files(model_dir, "the model")
    names = tensors.keys()
    for name, tensor in read_tensors(model_dir, names, torch.float32):
        torch.testing.assert_close(tensor, tensors[name].float(), rtol=0, atol=0, msg=name)
    assert read_model_config(model_dir).is_covered == (write is write_tiny_gemma2)


def test_pickled_weights_are_refused_before_anything_loads(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path)
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    torch.save(tensors, model_dir / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"holds pytorch_model\*\.bin and no safetensors: pickled weights"):
        read_model_config(model_dir)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [5, 6]}, (5, 6, 2)),
        ({"temperature": 0.5}, (2,)),
        (None, (2,)),
    ],
    ids=["named there", "not named there", "no such file"],
)
def test_what_ends_an_answer_stands_in_the_generation_config_and_else_in_the_config(
    generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """As under vLLM; the tokenizer's own, which is 2, always does. Hugging Face goes on where the former names none."""
    model_dir = write_tiny_llama(tmp_path)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    (model_dir / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}), encoding="utf-8")
    (model_dir / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (model_dir / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    assert read_model_config(model_dir).eos_token_ids == expected


@pytest.mark.parametrize("model_type", [*SUPPORTED_ARCHITECTURES, "phi3", "gemma2"])
def test_a_config_without_an_end_has_that_of_its_class(model_type: str, tmp_path: Path) -> None:
    """One with null has none."""
    from transformers import CONFIG_MAPPING

    model_dir = write_tiny_llama(tmp_path)
    for path in (model_dir / "generation_config.json", model_dir / "tokenizer_config.json"):
        path.unlink(missing_ok=True)
    written = CONFIG_MAPPING[model_type]().to_dict() | {"architectures": None}
    told = written["eos_token_id"]
    expected = () if told is None else (told,)
    shapes = {"sliding_window": None, "use_sliding_window": False, "vocab_size": 300_000}
    config = {key: value for key, value in (written | shapes).items() if key != "eos_token_id"}
    for fields, ends in ((config, expected), (config | {"eos_token_id": None}, ())):
        (model_dir / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        assert read_model_config(model_dir).eos_token_ids == ends
        assert read_foreign_model(model_dir).eos_token_ids == ends
