"""Quantised weights are read as the dense ones that they stand for, on both paths; what isn't read is refused.

The reference is a second, unquantised checkpoint of values that the test worked out itself, run by Hugging Face.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracles.family_checks import MAX_TOKENS, PROMPTS, pipeline_tokens
from oracles.pipeline_checks import hugging_face_tokens
from oracles.quantized_models import FORMS, quantize_checkpoint
from oracles.tiny_models import write_tiny_granite, write_tiny_llama, write_tiny_qwen3_moe
from stageline_runtime.model_facts.model_config import (
    UnsupportedModelError,
    model_config_from_dict,
    read_model_config,
)
from stageline_runtime.model_facts.model_shapes import layer_size
from stageline_runtime.models.weights.checkpoint import (
    WeightsError,
    check_shapes,
    files_of_tensors,
    read_tensors,
    tensor_names,
)

PATHS = {"own": write_tiny_llama, "coverage": write_tiny_granite}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)
QUERY = "model.layers.1.self_attn.q_proj"


def write_both(directory: Path, path: str, form: str) -> tuple[Path, Path]:
    """A quantised checkpoint, and a dense one of the values that it stands for."""
    quantised, dense = (PATHS[path](directory / name) for name in ("quantised", "dense"))
    save_file(quantize_checkpoint(quantised, form), dense / "model.safetensors", metadata={"format": "pt"})
    return quantised, dense


@EVERY_FORM
@pytest.mark.parametrize("path", PATHS)
def test_every_tensor_is_read_as_what_it_stands_for(path: str, form: str, tmp_path: Path) -> None:
    quantised, dense = write_both(tmp_path, path, form)
    expected = load_file(dense / "model.safetensors")
    assert tensor_names(quantised) == expected.keys()
    check_shapes(quantised, {name: tuple(tensor.shape) for name, tensor in expected.items()})
    for name, tensor in read_tensors(quantised, sorted(expected), torch.float32):
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("own", "fp8 by block"),
        ("coverage", "awq"),
        pytest.param("own", "awq", marks=pytest.mark.thorough),
        pytest.param("coverage", "fp8 by block", marks=pytest.mark.thorough),
        *(pytest.param(path, "gptq in the order of activations", marks=pytest.mark.thorough) for path in PATHS),
    ],
)
def test_greedy_tokens_are_those_of_the_dense_model(path: str, form: str, tmp_path: Path) -> None:
    quantised, dense = write_both(tmp_path, path, form)
    expected = hugging_face_tokens(dense, PROMPTS, MAX_TOKENS)
    plain = PATHS[path](tmp_path / "plain")
    assert hugging_face_tokens(plain, PROMPTS, MAX_TOKENS) != expected, "quantising changes nothing"
    for stage_count in (1, 2):
        actual = pipeline_tokens(quantised, stage_count)
        wrong = [index for index, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"P={stage_count}: prompts {wrong} of {len(expected)} differ"


def test_experts_of_a_mixture_are_read_too(tmp_path: Path) -> None:
    quantised, dense = (write_tiny_qwen3_moe(tmp_path / name) for name in ("quantised", "dense"))
    save_file(quantize_checkpoint(quantised, "fp8 by block"), dense / "model.safetensors", metadata={"format": "pt"})
    assert pipeline_tokens(quantised, 2) == hugging_face_tokens(dense, PROMPTS, MAX_TOKENS)


@EVERY_FORM
@pytest.mark.parametrize("path", PATHS)
def test_memory_and_cut_count_the_dense_matrices(path: str, form: str, tmp_path: Path) -> None:
    quantised, dense = write_both(tmp_path, path, form)
    counted = [[layer_size(read_model_config(each), layer) for layer in range(4)] for each in (quantised, dense)]
    assert counted[0] == counted[1]


def test_a_stage_fetches_the_files_of_all_parts(tmp_path: Path) -> None:
    index = {f"{QUERY}.qweight": "a", f"{QUERY}.qzeros": "b", f"{QUERY}.scales": "b", "model.norm.weight": "c"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    found = files_of_tensors(tmp_path, [f"{QUERY}.weight"])
    assert {path.name: names for path, names in found.items()} == {
        "a": [f"{QUERY}.qweight"],
        "b": [f"{QUERY}.qzeros", f"{QUERY}.scales"],
    }


def spoil(directory: Path, form: str, changes: dict[str, torch.Tensor | None]) -> Path:
    """A quantised Llama with some of the parts of one matrix changed, or left out where None."""
    model = write_tiny_llama(directory)
    quantize_checkpoint(model, form)
    path = model / "model.safetensors"
    tensors = load_file(path) | {f"{QUERY}.{part}": tensor for part, tensor in changes.items() if tensor is not None}
    left = {name: each for name, each in tensors.items() if changes.get(name.removeprefix(f"{QUERY}."), 1) is not None}
    save_file(left, path, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("fp8 by tensor", {"weight_scale": None}, "is torch.float8_e4m3fn, and has no scale beside it"),
        ("fp8 by block", {"weight_scale_inv": torch.ones(3, 3)}, "its scale has shape [3, 3]; with weight_block_size"),
        ("awq", {"scales": None}, "scales is missing"),
        ("awq", {"qzeros": torch.zeros(9, 9, dtype=torch.int32)}, "qzeros has shape [9, 9], not [2, 8]"),
        (
            "gptq in the order of activations",
            {"g_idx": torch.full((64,), 7, dtype=torch.int32)},
            "g_idx names groups beyond the 2 that there are",
        ),
        ("awq", {"qweight": torch.zeros(64, 8)}, "packed values are torch.float32, not int32"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    form: str, changes: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    model = spoil(tmp_path, form, changes)
    with pytest.raises(WeightsError) as refusal:
        list(read_tensors(model, [f"{QUERY}.weight"], torch.float32))
    assert words in str(refusal.value)
    assert QUERY in str(refusal.value)


def test_packed_weights_without_a_config_are_refused(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path)
    quantize_checkpoint(model, "awq")
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    del fields["quantization_config"]
    (model / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(WeightsError, match=r"is quantised, but config\.json has no quantization_config"):
        check_shapes(model, {f"{QUERY}.weight": (64, 64)})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config 'bitsandbytes' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 of quant_method 'gptq' is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' of quant_method 'awq' is not supported"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
            "format 'pack-quantized' of quant_method 'compressed-tensors' is not supported",
        ),
    ],
)
def test_other_forms_are_refused_with_the_engine_that_runs_them(config: dict[str, Any], words: str) -> None:
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes = {"num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64}
    with pytest.raises(UnsupportedModelError) as refusal:
        model_config_from_dict(llama | sizes | {"quantization_config": config}, {})
    assert words in str(refusal.value)
    assert "serve it with engine.name: vllm, or use unquantised weights" in str(refusal.value)
