"""A model that can't be run exactly is refused with the field and its value, before or while a stage loads."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracles.tiny_models import write_tiny_granite, write_tiny_mixtral
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts import model_coverage
from stageline_runtime.model_facts.model_config import UnsupportedModelError, model_config_from_dict, read_model_config
from stageline_runtime.models.families import build_any_stage_model
from stageline_runtime.models.protocol import StageShape
from stageline_runtime.models.weights.checkpoint import WeightsError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 4}
GRANITE = {"model_type": "granite"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"vision_config": {}}, "config.json has vision_config: models with other inputs than text are not supported yet"),
    ({"model_type": "gemma3", "text_config": {"hidden_size": 1}}, "config.json has text_config"),
    ({"audio_config": {"d_model": 4}}, "config.json has audio_config"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder true is not supported"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config 'hqq' is not supported"),
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral, mixtral, olmo2"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
    ({"num_attention_heads": True}, "num_attention_heads must be int, not True"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide 4 heads"),
    (
        {"rope_scaling": {"rope_type": "mrope"}},
        "rope_type 'mrope' is not supported; supported: default, dynamic, linear",
    ),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
    (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types names 1 layers, but"),
    (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention', but sliding_window is off"),
    (QWEN2 | {"layer_types": ["chunked_attention"] * 4}, "layer_types 'chunked_attention' is not supported"),
    (QWEN2 | {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
    (MIXTURE | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above num_local_experts 4"),
    (MIXTURE | {"num_local_experts": "4"}, "num_local_experts must be int, not '4'"),
    (GRANITE | {"num_experts": 8}, "num_experts 8 of model_type 'granite' is not supported: mixtures of experts"),
    (GRANITE | {"kv_lora_rank": 512}, "kv_lora_rank 512 of model_type 'granite' is not supported: compressed keys"),
    (GRANITE | {"num_kv_shared_layers": 2}, "num_kv_shared_layers 2 of model_type 'granite' is not supported"),
    (GRANITE | {"layer_types": ["linear_attention"]}, "layer_types 'linear_attention' is not supported"),
    (GRANITE | {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not supported"),
    (
        GRANITE | {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
        "rope_type 'longrope' is not supported; supported: default, linear, llama3, yarn",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED])
def test_a_config_is_refused_by_field_and_value(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        model_config_from_dict(LLAMA | changes, {})
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("installed", "sentence"),
    [
        (None, "not supported without transformers"),
        ("4.57.1", "needs transformers 5 or newer, but 4.57.1 is installed"),
    ],
)
def test_a_covered_model_names_the_extra_it_needs(
    installed: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(_name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError("transformers")
        return installed

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UnsupportedModelError) as refusal:
        model_config_from_dict(LLAMA | GRANITE, {})
    assert sentence in str(refusal.value)
    assert "install stageline[coverage]" in str(refusal.value)


def build(model_dir: Path) -> None:
    build_any_stage_model(
        model_dir,
        read_model_config(model_dir),
        StageShape(
            layers=LayerRange(first=0, last=1),
            is_first=True,
            is_last=False,
            dtype=torch.float32,
            num_cohorts=1,
            num_slots=1,
            slot_tokens=8,
        ),
        lambda _loaded, _total: None,
    )


def change_config(model_dir: Path, **changes: object) -> None:
    fields = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(fields | changes))


def remove_tensor(model_dir: Path, name: str) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    del tensors[name]
    save_file(tensors, model_dir / "model.safetensors")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    model_dir = write_tiny_mixtral(tmp_path)
    remove_tensor(model_dir, "model.layers.1.block_sparse_moe.experts.3.w2.weight")
    with pytest.raises(WeightsError, match=r"tensor model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight is mis"):
        build(model_dir)


def test_a_covered_models_missing_tensor_is_named(tmp_path: Path) -> None:
    model_dir = write_tiny_granite(tmp_path)
    remove_tensor(model_dir, "model.layers.1.self_attn.q_proj.weight")
    with pytest.raises(WeightsError, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.weight is missing"):
        build(model_dir)


def test_heads_that_the_config_misstates_are_found_when_loading(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    change_config(tmp_path, num_key_value_heads=2)
    with pytest.raises(WeightsError, match=r"layer 0 has keys of 4 heads of size 8; config\.json says 2 heads of size"):
        build(tmp_path)


def test_attention_arguments_that_are_not_built_are_found_when_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are in a family that nobody knows of yet; this one is refused by its name."""
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM

    monkeypatch.setattr(model_coverage, "_REFUSED_FAMILIES", {})
    config = GraniteSWAConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    GraniteSWAForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="gives attention s_aux, which is not supported"):
        build(tmp_path)
