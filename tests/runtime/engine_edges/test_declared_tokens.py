"""Tokens that only files beside `tokenizer.json` have are the tokenizer's, as transformers loads it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from oracles.tokenizer_models import SPECIAL_TOKENS, write_byte_fallback, write_byte_level
from stageline_runtime.engine.text.tokenizer import EngineTokenizer
from stageline_runtime.model_facts.tokenizer_files import read_tokenizer_settings, with_end_token
from stageline_runtime.termination import RuntimeFailure

SIZE = len(SPECIAL_TOKENS) + 256
TEXT = "a <new> b<other>c</s> <pad><think>x"


def declared(content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    return {"content": content, "special": special, "normalized": False, "lstrip": False, "rstrip": False, **flags}


CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "decoder": {"added_tokens_decoder": {str(SIZE): declared("<new>"), str(SIZE + 1): declared("<other>", False)}},
    "decoder that strips": {"added_tokens_decoder": {str(SIZE): declared("<new>", lstrip=True, rstrip=True)}},
    "decoder with other flags": {"added_tokens_decoder": {"1": declared("</s>", False)}},
    "named token without a number": {"added_tokens_decoder": {str(SIZE): declared("<new>")}, "pad_token": "<pad>"},
    "named tokens of an object": {"extra_special_tokens": {"think_token": "<think>"}},
    "list of special tokens": {"additional_special_tokens": ["<new>", "<think>"]},
}
OLDER: dict[str, dict[str, dict[str, Any]]] = {
    "added_tokens.json": {"added_tokens.json": {"<new>": SIZE, "<other>": SIZE + 1}},
    "both of before": {
        "added_tokens.json": {"<new>": SIZE, "<pad>": SIZE + 1},
        "special_tokens_map.json": {"pad_token": "<pad>", "eos_token": {"content": "<new>", "lstrip": False}},
    },
    "lists in both": {
        "tokenizer_config.json": {"additional_special_tokens": ["<new>", "<pad>"]},
        "special_tokens_map.json": {"additional_special_tokens": ["<new>", "<think>"]},
    },
    "lists in both that are joined": {
        "tokenizer_config.json": {"extra_special_tokens": ["<new>"]},
        "special_tokens_map.json": {"extra_special_tokens": ["<new>", "<think>"]},
    },
    "an object and a list": {
        "tokenizer_config.json": {"extra_special_tokens": {"image_token": "<new>"}},
        "special_tokens_map.json": {"additional_special_tokens": ["<think>"]},
    },
}


def assert_equal_to_transformers(directory: Path) -> None:
    from transformers import AutoTokenizer

    expected: Any = AutoTokenizer.from_pretrained(directory)
    tokenizer = EngineTokenizer.load(directory)
    ids = list(tokenizer.encode(TEXT, add_special_tokens=False))
    assert ids == expected(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    named = {key: str(value) for key, value in expected.special_tokens_map.items() if isinstance(value, str)}
    assert dict(read_tokenizer_settings(directory).special_tokens) == named


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_declared_tokens_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_equal_to_transformers(write_byte_level(tmp_path, **config))


@pytest.mark.parametrize("files", OLDER.values(), ids=OLDER.keys())
def test_files_of_before_declare_tokens_too(tmp_path: Path, files: dict[str, dict[str, Any]]) -> None:
    directory = write_byte_level(tmp_path)
    own = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    every: dict[str, dict[str, Any]] = {"tokenizer_config.json": {}} | files
    for name, content in every.items():
        written = own | content if name == "tokenizer_config.json" else content
        (directory / name).write_text(json.dumps(written), encoding="utf-8")
    assert_equal_to_transformers(directory)


@pytest.mark.parametrize("named", [{"image_token": "<new>"}, ["<new>"]], ids=["named", "listed"])
def test_a_named_token_is_hidden_though_the_tokenizer_calls_it_plain(tmp_path: Path, named: Any) -> None:
    directory = write_byte_level(tmp_path, extra_special_tokens=named)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<new>", special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert_equal_to_transformers(directory)


def test_a_special_token_of_the_vocabulary_alone_is_hidden_as_in_transformers(tmp_path: Path) -> None:
    directory = write_byte_fallback(tmp_path)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"] = []
    path.write_text(json.dumps(content), encoding="utf-8")
    assert_equal_to_transformers(directory)


def test_a_token_with_another_number_than_its_place_is_refused(tmp_path: Path) -> None:
    directory = write_byte_level(tmp_path, added_tokens_decoder={str(SIZE + 7): declared("<new>")})
    with pytest.raises(RuntimeFailure, match=f"'<new>' has the id {SIZE + 7}, but tokenizer.json lacks it"):
        EngineTokenizer.load(directory)


@pytest.mark.parametrize("config", [{"added_tokens_decoder": []}, {"added_tokens_decoder": {"x": "<new>"}}], ids=str)
def test_declarations_of_another_form_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    directory = write_byte_level(tmp_path, **config)
    with pytest.raises(RuntimeFailure, match=r"tokenizer_config.json: added_tokens_decoder"):
        EngineTokenizer.load(directory)


@pytest.mark.parametrize(
    ("eos_token", "ends"),
    [("<|im_end|>", (1, 3)), ("</s>", (1,)), ("<new>", (1, SIZE)), ("a", (1, 4 + ord("a"))), ("<none>", (1,))],
)
def test_the_tokenizers_own_end_ends_answers_too(tmp_path: Path, eos_token: str, ends: tuple[int, ...]) -> None:
    """Whether it is an added token, one of the vocabulary, or declared beside `tokenizer.json`."""
    directory = write_byte_level(tmp_path, added_tokens_decoder={str(SIZE): declared("<new>")}, eos_token=eos_token)
    assert with_end_token((1,), directory, SIZE + 1) == ends
    assert with_end_token((1,), directory, 2) == (1,), "an id beyond the model's vocabulary is no end"


def test_the_end_of_a_vocabulary_of_pieces_is_its_place(tmp_path: Path) -> None:
    from tokenizers import models

    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("<end>", -2.0)], unk_id=0))
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}', encoding="utf-8")
    assert with_end_token((), tmp_path, 3) == (2,)
