"""What texts take, by what Python says of them."""

import json
import sys
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.engine_http import ChatMessage, ChatPrompt, GenerateRequest, SamplingParams
from stageline_gateway.admission.body_sizes import held_text_bytes, most_text_bytes, text_bytes

EMPTY: Final = 80
"""What Python has beside the characters of a text, at most."""
TEXTS: Final = st.text(alphabet=st.sampled_from('xé\u4e2d\U0001f600\\u"\n'), max_size=300)


def taken(text: str) -> int:
    """What Python says, and its UTF-8, which it may have beside."""
    return sys.getsizeof(text) - EMPTY + (0 if text.isascii() else len(text.encode()))


@given(TEXTS)
def test_a_text_takes_what_python_says(text: str) -> None:
    assert taken(text) <= text_bytes(text)
    if len(text) > 64:
        assert text_bytes(text) <= taken(text) + EMPTY


@given(st.lists(TEXTS, max_size=5), st.booleans())
def test_before_a_body_is_parsed_its_texts_are_bounded(texts: list[str], ascii_only: bool) -> None:
    raw = json.dumps({"texts": texts}, ensure_ascii=ascii_only).encode()
    assert sum(map(taken, texts)) <= most_text_bytes(raw)


@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize(("letter", "factor"), [("x", 1), ("é", 4), ("\u4e2d", 5), ("\U0001f600", 8)])
def test_the_bound_is_not_far_off(letter: str, factor: int, escaped: bool) -> None:
    raw = json.dumps({"text": letter * 10_000}, ensure_ascii=escaped).encode()
    assert most_text_bytes(raw) <= len(raw) + 2 * factor * 10_000


def test_one_wide_letter_makes_all_of_its_text_wide() -> None:
    text = "x" * 1_000_000 + "\U0001f600"
    assert 5_000_000 <= text_bytes(text) < 5_000_100
    assert 5_000_000 <= most_text_bytes(json.dumps({"text": text}).encode()) < 5_100_000


def test_what_is_held_counts_once_wherever_it_is_and_joined_again() -> None:
    text, joined = "x" * 1000, "x" * 999 + "y"
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content=text), ChatMessage(role="user", content=joined)))
    request = GenerateRequest(request_id="a", prompt=prompt, sampling=SamplingParams())
    fields: Any = {"messages": [{"content": text}], text: (1, text), "ids": [1, 2, 3]}
    assert 2000 <= held_text_bytes(request, fields, text) < 2200
