"""Raw text gets the same ids as from transformers, edge tokens included; broken files stop the start."""

from pathlib import Path
from typing import Any

import pytest

from oracles.tokenizer_models import write_byte_fallback, write_byte_level
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.termination import RuntimeFailure

TEXTS = ("", "hello world", "<|im_start|>user é😀", "<s>twice", " \n\t", "the café 07")


@pytest.mark.parametrize("template_adds_bos", [False, True], ids=["plain", "post-processor"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="unsaid"),
        pytest.param({"add_bos_token": True}, id="bos"),
        pytest.param({"add_bos_token": False}, id="no-bos"),
        pytest.param({"add_bos_token": True, "add_eos_token": True}, id="bos-eos"),
        pytest.param({"add_bos_token": True, "bos_token": None}, id="bos-without-token"),
    ],
)
def test_edge_tokens_equal_transformers(tmp_path: Path, config: dict[str, Any], template_adds_bos: bool) -> None:
    from transformers import AutoTokenizer

    directory = write_byte_level(tmp_path, (b"hello",), template_adds_bos=template_adds_bos, **config)
    tokenizer, oracle = EngineTokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert list(tokenizer.encode(text, add_special_tokens=True)) == oracle(text)["input_ids"], text
        plain = oracle(text, add_special_tokens=False)["input_ids"]
        assert list(tokenizer.encode(text, add_special_tokens=False)) == plain, text
        assert tokenizer.decode(plain) == oracle.decode(plain, skip_special_tokens=True), text


def test_byte_fallback_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = write_byte_fallback(tmp_path, add_bos_token=True)
    tokenizer, oracle = EngineTokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        ids = oracle(text)["input_ids"]
        assert list(tokenizer.encode(text, add_special_tokens=True)) == ids, text
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    directory = write_byte_level(tmp_path)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    assert len(EngineTokenizer.load(directory).encode("four", add_special_tokens=False)) == 4


@pytest.mark.parametrize("content", ["", "{}", "no json", '{"model": {"type": "Unknown"}}'])
def test_a_file_that_is_no_tokenizer_stops_the_start(tmp_path: Path, content: str) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(RuntimeFailure, match=r"tokenizer\.json is not a tokenizer"):
        EngineTokenizer.load(tmp_path)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"tokenizer\.json is missing"):
        EngineTokenizer.load(tmp_path)


def test_a_lone_surrogate_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"lone surrogate U\+D83D at character 2"):
        EngineTokenizer.load(write_byte_level(tmp_path)).encode("ab\ud83d", add_special_tokens=True)
