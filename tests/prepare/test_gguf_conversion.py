"""A converted GGUF file is the model it was made from: same weights, same tokens, same settings."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from tokenizers import Tokenizer

from oracles.tiny_gguf import write_tiny_gguf
from oracles.tiny_models import write_tiny_llama, write_tiny_qwen3
from stageline_runtime.engine.text.template_files import read_tokenizer_config
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.prepare.errors import BadConfigError
from stageline_runtime.prepare.gguf.convert import convert_gguf
from stageline_runtime.prepare.progress import PlainReporter

WRITERS = {"llama": write_tiny_llama, "qwen3": write_tiny_qwen3}


def convert(gguf_file: Path, directory: Path) -> Path:
    directory.mkdir()
    convert_gguf(gguf_file, directory, PlainReporter(io.StringIO()))
    return directory


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), num_layers=2)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", WRITERS)
def test_unquantised_weights_survive_bit_for_bit(architecture: str, tied: bool, tmp_path: Path) -> None:
    original = WRITERS[architecture](tmp_path / "hf", num_layers=3, tie_word_embeddings=tied)
    gguf_file = write_tiny_gguf(tmp_path / "m.gguf", original, quantization=GGMLQuantizationType.F32)
    converted = convert(gguf_file, tmp_path / "converted")
    expected = load_file(original / "model.safetensors")
    actual = load_file(converted / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert ("lm_head.weight" in actual) is not tied
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    config = read_model_config(converted)
    ends = (*read_model_config(original).eos_token_ids, 0)
    assert config == dataclasses.replace(read_model_config(original), dtype="float32", eos_token_ids=ends)


def transformers_gguf_tensors(gguf_file: Path, model: Any) -> dict[str, torch.Tensor]:
    """The file's tensors as transformers itself reads them: an independent implementation of the same mapping."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    load: Any = gguf_utils.load_gguf_checkpoint
    tensors: dict[str, torch.Tensor] = load(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    return tensors


@pytest.mark.parametrize("architecture", WRITERS)
def test_quantised_weights_equal_transformers_own_reading(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    original = WRITERS[architecture](tmp_path / "hf", num_layers=2, tie_word_embeddings=False)
    gguf_file = write_tiny_gguf(tmp_path / "m.gguf", original)
    model = AutoModelForCausalLM.from_pretrained(convert(gguf_file, tmp_path / "converted"), dtype=torch.float32)
    theirs = transformers_gguf_tensors(gguf_file, model)
    ours = model.state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name


KINDS = {
    GGMLQuantizationType.F16: (torch.float16, "float16"),
    GGMLQuantizationType.BF16: (torch.bfloat16, "bfloat16"),
    GGMLQuantizationType.Q8_0: (torch.float32, "bfloat16"),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_numbers_of_a_file_stay_what_they_are(kind: GGMLQuantizationType, tiny_llama: Path, tmp_path: Path) -> None:
    """Vectors are float32 in any file; what the config says is what `auto` computes in."""
    converted = convert(write_tiny_gguf(tmp_path / "m.gguf", tiny_llama, quantization=kind), tmp_path / "converted")
    stored, computed = KINDS[kind]
    original = load_file(tiny_llama / "model.safetensors")
    for name, tensor in load_file(converted / "model.safetensors").items():
        is_matrix = tensor.dim() > 1
        assert tensor.dtype == (stored if is_matrix else torch.float32), name
        if kind is not GGMLQuantizationType.Q8_0:
            assert torch.equal(tensor, original[name].to(tensor.dtype)), name
    assert json.loads((converted / "config.json").read_text())["dtype"] == computed


def test_converted_model_generates_what_the_original_does(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_file = write_tiny_gguf(tmp_path / "m.gguf", tiny_llama, quantization=GGMLQuantizationType.F32)
    converted = convert(gguf_file, tmp_path / "converted")
    texts = []
    for directory in (tiny_llama, converted):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        messages = [{"role": "user", "content": "the cat and 12 dogs, é"}]
        inputs: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        texts.append(model.generate(**inputs, max_new_tokens=24, do_sample=False)[0].tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        pytest.param("smollm", "a  12", ["a", "ĠĠ", "1", "2"], id="smollm-splits-digits-first"),
        pytest.param("gpt-2", "a  12", ["a", "Ġ", "Ġ", "1", "2"], id="gpt-2-gives-numbers-their-space"),
        pytest.param("qwen2", "e\u0301\n\nx", ["Ã", "©", "Ċ", "Ċ", "x"], id="qwen2-composes-characters"),
        pytest.param("llama-bpe", "<|im_end|>x", ["<|im_start|>", "<|im_end|>", "x"], id="llama-bpe-starts-with-bos"),
    ],
)
def test_each_pre_tokenizer_splits_as_its_model_was_trained(
    pre: str, text: str, pieces: list[str], tiny_llama: Path, tmp_path: Path
) -> None:
    with_spaces = tmp_path / "hf"
    with_spaces.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
        (with_spaces / name).write_bytes((tiny_llama / name).read_bytes())
    tokenizer = json.loads((tiny_llama / "tokenizer.json").read_text())
    # A merge of two spaces shows whether a number took one of them.
    last = max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    tokenizer["model"]["vocab"]["ĠĠ"] = tokenizer["model"]["vocab"].pop(last)
    tokenizer["model"]["merges"] = [["Ġ", "Ġ"]]
    (with_spaces / "tokenizer.json").write_text(json.dumps(tokenizer))
    gguf_file = write_tiny_gguf(tmp_path / "m.gguf", with_spaces, overrides={"tokenizer.ggml.pre": pre})
    converted = Tokenizer.from_file(str(convert(gguf_file, tmp_path / "converted") / "tokenizer.json"))
    assert converted.encode(text).tokens == pieces


def test_without_a_chat_template_the_setting_is_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    gguf_file = write_tiny_gguf(tmp_path / "m.gguf", tiny_llama, overrides={"tokenizer.chat_template": None})
    settings = json.loads((convert(gguf_file, tmp_path / "converted") / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings
    assert settings["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param({"overrides": {"tokenizer.ggml.pre": "tekken"}}, "tokenizer.ggml.pre 'tekken'", id="pre"),
        pytest.param({"overrides": {"tokenizer.ggml.pre": None}}, "tokenizer.ggml.pre is missing", id="no-pre"),
        pytest.param(
            {"overrides": {"tokenizer.ggml.pre": "default"}}, "tokenizer.ggml.pre 'default'", id="default-pre"
        ),
        pytest.param(
            {"overrides": {"tokenizer.ggml.add_eos_token": True}}, "add_eos_token true is not supported", id="adds-eos"
        ),
        pytest.param({"overrides": {"llama.rope.scale_linear": 4.0}}, "rope.scale_linear 4.0", id="older-rope"),
        pytest.param({"overrides": {"llama.rope.scaling.factor": 4.0}}, "rope.scaling.factor 4.0", id="rope-factor"),
        pytest.param({"overrides": {"llama.attention.sliding_window": 32}}, "sliding_window 32", id="window"),
        pytest.param({"overrides": {"llama.logit_scale": 0.5}}, "llama.logit_scale 0.5", id="logit-scale"),
        pytest.param({"overrides": {"llama.expert_count": 8}}, "llama.expert_count 8", id="experts"),
        pytest.param({"overrides": {"llama.new_key": "x"}}, "metadata key llama.new_key", id="unknown-key"),
        pytest.param({"overrides": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model 'llama'", id="tokenizer"),
        pytest.param({"overrides": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type 'yarn'", id="rope"),
        pytest.param({"left_out": frozenset({"blk.1.ffn_up.weight"})}, "blk.1.ffn_up.weight is missing", id="missing"),
        pytest.param(
            {"extra_tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "blk.0.attn_q.bias", id="unknown"
        ),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(
    arguments: dict[str, Any], named: str, tiny_llama: Path, tmp_path: Path
) -> None:
    gguf_file = write_tiny_gguf(tmp_path / "m.gguf", tiny_llama, **arguments)
    with pytest.raises(BadConfigError) as refusal:
        convert(gguf_file, tmp_path / "converted")
    assert named in refusal.value.message


def test_keys_that_change_nothing_are_taken(tiny_llama: Path, tmp_path: Path) -> None:
    neutral = {
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    converted = convert(write_tiny_gguf(tmp_path / "m.gguf", tiny_llama, overrides=neutral), tmp_path / "converted")
    assert read_model_config(converted).rope_scaling is None
    generation = json.loads((converted / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_k"]) == (0.6, 20)


@pytest.mark.parametrize(
    ("renamed", "overrides", "ends"),
    [
        pytest.param({}, {}, {"<|im_end|>"}, id="declared"),
        pytest.param({"Q": "<eos>", "X": "<EOT>"}, {}, {"<|im_end|>", "<eos>", "<EOT>"}, id="by-name"),
        pytest.param(
            {"Q": "<|end|>", "X": "<|end_of_text|>"}, {}, {"<|im_end|>", "<|end|>", "<|end_of_text|>"}, id="more"
        ),
        pytest.param(
            {"Q": "<|end|>", "X": "<|return|>", "Z": "<|call|>"},
            {},
            {"<|im_end|>", "<|return|>", "<|call|>"},
            id="gpt-oss",
        ),
        pytest.param({"Q": "<bye>"}, {"tokenizer.ggml.eot_token_id": "Q"}, {"<|im_end|>", "<bye>"}, id="declared-eot"),
        pytest.param({"Q": "<bye>"}, {"tokenizer.ggml.eom_token_id": "Q"}, {"<|im_end|>", "<bye>"}, id="declared-eom"),
    ],
)
def test_answers_end_where_llama_cpp_ends_them(
    renamed: dict[str, str], overrides: dict[str, str], ends: set[str], tiny_llama: Path, tmp_path: Path
) -> None:
    vocabulary = json.loads((tiny_llama / "tokenizer.json").read_text())["model"]["vocab"]
    gguf_file = write_tiny_gguf(
        tmp_path / "m.gguf",
        tiny_llama,
        overrides={key: vocabulary[token] for key, token in overrides.items()},
        renamed_tokens=renamed,
    )
    converted = convert(gguf_file, tmp_path / "converted")
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    found = {tokenizer.id_to_token(index) for index in read_model_config(converted).eos_token_ids}
    assert found == ends | {"<|endoftext|>"}, "which the tiny vocabulary has anyway"
    named = ends - {"<bye>"}
    assert all(len(tokenizer.encode(f"x{token}y", add_special_tokens=False).ids) == 3 for token in named), "as control"


def test_named_chat_templates_are_kept(tiny_llama: Path, tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    converted = convert(write_tiny_gguf(tmp_path / "m.gguf", tiny_llama, overrides=named), tmp_path / "converted")
    templates = read_tokenizer_config(converted).chat_templates
    assert set(templates) == {"default", "tool_use"}
    assert templates["tool_use"] == "{{ tools }}"


def test_another_architecture_is_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    other = tmp_path / "hf"
    other.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((tiny_llama / name).read_bytes())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "gemma3"}))
    with pytest.raises(
        BadConfigError, match=r"general\.architecture 'gemma3' is not supported; supported: llama, qwen3"
    ):
        convert(write_tiny_gguf(tmp_path / "m.gguf", other), tmp_path / "converted")


@pytest.mark.parametrize("kept", [0, 3, 40, 5000, 60_000], ids=lambda kept: f"{kept}-bytes")
def test_a_cut_off_file_is_refused_in_a_sentence(kept: int, tiny_llama: Path, tmp_path: Path) -> None:
    gguf_file = write_tiny_gguf(tmp_path / "m.gguf", tiny_llama)
    gguf_file.write_bytes(gguf_file.read_bytes()[:kept])
    with pytest.raises(BadConfigError, match="not a readable GGUF file"):
        convert(gguf_file, tmp_path / "converted")
