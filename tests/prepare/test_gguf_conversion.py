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
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from oracles.tiny_gguf import write_tiny_gguf
from oracles.tiny_models import write_tiny_llama, write_tiny_qwen3
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.prepare.errors import BadConfigError
from stageline_runtime.prepare.gguf.convert import convert_gguf, to_bfloat16
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
    expected = {name: tensor.bfloat16() for name, tensor in load_file(original / "model.safetensors").items()}
    actual = load_file(converted / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert ("lm_head.weight" in actual) is not tied
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    config = read_model_config(converted)
    assert config == dataclasses.replace(read_model_config(original), dtype="bfloat16")


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
        assert torch.equal(tensor.bfloat16().float(), ours[name]), name


def test_converted_model_generates_what_the_original_does(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_file = write_tiny_gguf(tmp_path / "m.gguf", tiny_llama, quantization=GGMLQuantizationType.F32)
    converted = convert(gguf_file, tmp_path / "converted")
    texts = []
    for directory in (tiny_llama, converted):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        # The original is rounded as the conversion rounds, so that the two are the same numbers.
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        messages = [{"role": "user", "content": "the cat and 12 dogs, é"}]
        inputs: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        texts.append(model.float().generate(**inputs, max_new_tokens=24, do_sample=False)[0].tolist())
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


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_rounding_is_torchs(value: float) -> None:
    bits = to_bfloat16(np.array([value], np.float32))
    assert bits.view(np.int16)[0] == torch.tensor([value]).bfloat16().view(torch.int16)[0].item()
