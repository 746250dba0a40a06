"""Text that arrives in pieces is the text of all tokens at once, and no piece ends in half a character."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracles.tokenizer_models import SPECIAL_TOKENS, write_byte_fallback, write_byte_level
from stageline_runtime.engine.text.detokenizer import MAX_WAITING_TOKENS, REPLACEMENT, IncrementalDetokenizer
from stageline_runtime.engine.text.tokenizer import EngineTokenizer

CROSSING_TOKENS = (b"\x82\xac\xe2", "€".encode(), "é a".encode(), b"\xf0\x9f", b" the", b"\x98\x80", b"a\xe2\x82")
"""Tokens that begin or end inside a character."""
FIRST_BYTE_ID = len(SPECIAL_TOKENS)
BYTE_LEVEL_SIZE = FIRST_BYTE_ID + 256 + len(CROSSING_TOKENS)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> EngineTokenizer:
    return EngineTokenizer.load(write_byte_level(tmp_path_factory.mktemp("byte_level"), CROSSING_TOKENS))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> EngineTokenizer:
    return EngineTokenizer.load(write_byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


def ids_of_bytes(data: bytes) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in data]


any_ids = st.lists(st.integers(0, BYTE_LEVEL_SIZE + 3), max_size=60)
emoji_ids = st.text(max_size=12).map(lambda text: ids_of_bytes(text.encode()))
crossing_ids = st.lists(st.integers(FIRST_BYTE_ID + 256, BYTE_LEVEL_SIZE - 1), max_size=60)
high_byte_ids = st.binary(max_size=60).map(lambda data: ids_of_bytes(bytes(byte | 0x80 for byte in data)))


@given(
    token_ids=st.lists(st.one_of(any_ids, emoji_ids, crossing_ids, high_byte_ids), max_size=4).map(
        lambda runs: list(chain.from_iterable(runs))
    ),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=10),
)
def test_pieces_join_to_the_decoding_of_all_ids(
    byte_level: EngineTokenizer, token_ids: list[int], sizes: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    pieces, start, turn = [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(token_ids[start : start + size]))
        start, turn = start + size, turn + 1
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == byte_level.decode(token_ids), pieces


@given(text=st.text(alphabet=st.sampled_from("the a café!\n07 €😀👩‍👩‍👧é\u0301中"), max_size=40))
def test_pieces_join_with_byte_fallback_and_leading_spaces(byte_fallback: EngineTokenizer, text: str) -> None:
    token_ids = byte_fallback.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_fallback)
    pieces = [detokenizer.push((index,)) for index in token_ids] + [detokenizer.flush()]
    assert "".join(pieces) == byte_fallback.decode(token_ids), pieces
    assert all(REPLACEMENT not in piece for piece in pieces), pieces


@given(
    prompt=st.text(alphabet=st.sampled_from("the a café!\n07 €😀中"), max_size=60),
    text=st.text(alphabet=st.sampled_from("the a café!\n07 €😀中"), max_size=30),
)
def test_an_output_is_what_it_adds_to_the_decoding_of_its_prompt(
    byte_fallback: EngineTokenizer, prompt: str, text: str
) -> None:
    prompt_ids = byte_fallback.encode(prompt, add_special_tokens=False)
    token_ids = byte_fallback.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_fallback, prompt_ids)
    pieces = [detokenizer.push((index,)) for index in token_ids] + [detokenizer.flush()]
    assert byte_fallback.decode(prompt_ids) + "".join(pieces) == byte_fallback.decode(prompt_ids + token_ids), pieces


@pytest.mark.parametrize("num_special", [0, 1, 40])
def test_the_first_word_keeps_its_blank_behind_a_prompt(byte_fallback: EngineTokenizer, num_special: int) -> None:
    prompt_ids = [*byte_fallback.encode("the café", add_special_tokens=False), *[1] * num_special]
    [mark, *_] = byte_fallback.encode(" the", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_fallback, prompt_ids)
    assert detokenizer.push((mark,)) == " "


def test_a_character_whose_first_half_is_the_prompts_belongs_to_the_output(byte_level: EngineTokenizer) -> None:
    data = "aé€".encode()
    for cut in range(2, len(data)):
        detokenizer = IncrementalDetokenizer(byte_level, ids_of_bytes(data[:cut]))
        whole = data[:cut].decode(errors="ignore")
        pieces = [detokenizer.push((index,)) for index in ids_of_bytes(data[cut:] + b"x")]
        assert whole + "".join(pieces) == "aé€x", (cut, pieces)


def test_half_a_character_that_the_output_does_not_complete_stays_the_prompts(byte_level: EngineTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, ids_of_bytes("a€".encode()[:-1]))
    assert detokenizer.push(ids_of_bytes(b"x")) == "x"
    typed = IncrementalDetokenizer(byte_level, ids_of_bytes(f"a{REPLACEMENT}".encode()))
    assert typed.push(ids_of_bytes(b"x")) == "x"


@pytest.mark.parametrize("text", ["😀", "aé€😀b", "👩‍👩‍👧", "日本語"], ids=ascii)
def test_a_character_shows_only_when_whole_and_then_at_once(byte_level: EngineTokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    for character in text:
        data = character.encode()
        pieces = [detokenizer.push(ids_of_bytes(data[index : index + 1])) for index in range(len(data))]
        assert pieces == [""] * (len(data) - 1) + [character]


def test_whole_characters_before_half_a_one_are_not_held_back(byte_level: EngineTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    ends_in_half = FIRST_BYTE_ID + 256 + CROSSING_TOKENS.index(b"a\xe2\x82")
    assert detokenizer.push((ends_in_half,)) == "a"
    assert detokenizer.push(ids_of_bytes(b"\xac")) == "€"


def test_special_tokens_and_unknown_ids_show_nothing(byte_level: EngineTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push((0, 3, BYTE_LEVEL_SIZE + 100)) == ""
    assert detokenizer.push(ids_of_bytes(b"x")) == "x"
    assert detokenizer.flush() == ""


def test_an_incomplete_character_at_the_end_becomes_one_replacement(byte_level: EngineTokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(ids_of_bytes("😀".encode()[:3])) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


class CountingTokenizer(EngineTokenizer):
    """Counts the ids it decodes: the work of a detokenizer."""

    decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("data", [b"plain text ", b"\xff", "😀".encode(), b"\xe2\x82"], ids=ascii)
def test_work_per_token_does_not_grow_with_the_output(tmp_path: Path, data: bytes) -> None:
    directory = write_byte_level(tmp_path)
    tokenizer = CountingTokenizer.load(directory)
    assert isinstance(tokenizer, CountingTokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer)
    token_ids = ids_of_bytes(data) * (4000 // len(data))
    for index in token_ids:
        detokenizer.push((index,))
    assert tokenizer.decoded <= 3 * MAX_WAITING_TOKENS * len(token_ids)
