"""Of a model that another engine computes the numbers that cut and edge need are read, and nothing is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from stageline_runtime.model_facts.foreign_model import UNSAID_CONTEXT, read_foreign_model
from stageline_runtime.model_facts.model_config import UnsupportedModelError, read_model_config
from stageline_runtime.planning.cut import cut_layers, estimate_costs

TEXT: dict[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300,
    "max_position_embeddings": 512, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "quantised": TEXT | {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
    "with pictures": {"model_type": "llava", "text_config": TEXT, "vision_config": {"hidden_size": 9}},
    "compressed keys": TEXT | {"model_type": "deepseek_v3", "kv_lora_rank": 16, "n_routed_experts": 4},
    "unheard of": TEXT | {"model_type": "tomorrow", "hidden_act": "swoosh"},
}


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", CONFIGS)
def test_what_the_own_runtime_refuses_is_read(tmp_path: Path, name: str) -> None:
    model_dir = write(tmp_path, CONFIGS[name])
    with pytest.raises(UnsupportedModelError):
        read_model_config(model_dir)
    model = read_foreign_model(model_dir)
    assert (model.num_layers, model.vocab_size, model.context_length) == (8, 300, 512)
    assert (model.eos_token_ids, model.dtype) == ((2,), "bfloat16")
    costs = estimate_costs(model)
    cut = cut_layers(
        8, 2, layer_cost=costs.layer, embedding_cost=costs.embedding, head_cost=costs.head, explicit=None, memory=None
    )
    assert sum(each.count for each in cut) == 8


def test_ends_of_sequence_are_those_of_the_generation_config(tmp_path: Path) -> None:
    model_dir = write(tmp_path, CONFIGS["quantised"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_foreign_model(model_dir).eos_token_ids == (5, 6)


NAMES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 8, "n_embd": 64, "n_head": 4, "n_positions": 512, "vocab_size": 300},
    "chatglm": {
        "num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 512, "padded_vocab_size": 300,
    },
    "mpt": {"n_layers": 8, "d_model": 64, "n_heads": 4, "max_seq_len": 512, "vocab_size": 300},
}  # fmt: skip


@pytest.mark.parametrize("family", NAMES)
def test_the_numbers_are_found_by_the_names_that_a_family_gives_them(tmp_path: Path, family: str) -> None:
    model = read_foreign_model(write(tmp_path, {"model_type": family, **NAMES[family]}))
    assert (model.num_layers, model.hidden_size, model.num_heads) == (8, 64, 4)
    assert (model.vocab_size, model.context_length) == (300, 512)


def test_a_model_without_a_longest_context_has_vllms_own(tmp_path: Path) -> None:
    config = {name: value for name, value in TEXT.items() if name != "max_position_embeddings"}
    assert read_foreign_model(write(tmp_path, config | {"model_type": "mamba2"})).context_length == UNSAID_CONTEXT


@pytest.mark.parametrize("field", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_a_number_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    config = {name: value for name, value in CONFIGS["quantised"].items() if name != field}
    with pytest.raises(UnsupportedModelError, match=field):
        read_foreign_model(write(tmp_path, config))


DTYPES: dict[str, tuple[dict[str, Any], str]] = {
    "float16": ({"torch_dtype": "float16"}, "float16"),
    "float16, newer name": ({"torch_dtype": None, "dtype": "float16"}, "float16"),
    "bfloat16": ({"torch_dtype": "bfloat16"}, "bfloat16"),
    "float32": ({"torch_dtype": "float32"}, "float32"),
    "unsaid": ({"torch_dtype": None}, "float32"),
    "of no arithmetic": ({"torch_dtype": "float8_e4m3fn"}, "float32"),
}


@pytest.mark.parametrize("name", DTYPES)
def test_auto_is_the_dtype_that_the_checkpoint_names(tmp_path: Path, name: str) -> None:
    """vLLM's own `auto` would round a float32 checkpoint; a float16 one must not be widened, as kernels differ."""
    fields, expected = DTYPES[name]
    assert read_foreign_model(write(tmp_path, CONFIGS["unheard of"] | fields)).dtype == expected


def test_of_a_model_with_pictures_the_text_part_names_the_dtype_and_else_the_whole(tmp_path: Path) -> None:
    text = TEXT | {"torch_dtype": "float16"}
    both = {"model_type": "llava", "dtype": "bfloat16", "text_config": text}
    assert read_foreign_model(write(tmp_path, both)).dtype == "float16"
    silent = {**both, "text_config": TEXT | {"torch_dtype": None}}
    assert read_foreign_model(write(tmp_path, silent)).dtype == "bfloat16"
