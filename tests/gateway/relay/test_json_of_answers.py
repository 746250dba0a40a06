"""The JSON that clients get is ASCII and holds what was written."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_gateway.endpoints.json_answers import encode_json

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_json_is_ascii_and_comes_back_as_it_was(value: Any) -> None:
    assert encode_json(value).isascii()
    assert json.loads(encode_json(value)) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_numbers_that_json_has_not_are_null(value: Any) -> None:
    assert encode_json([value]) == (b"[[null]]" if isinstance(value, list) else b"[null]")


@pytest.mark.parametrize("text", ["\ud800", "ü\u2028\U0001f600", "a"])
def test_what_is_json_already_is_kept_beside_any_text(text: str) -> None:
    """Also beside half a character."""
    written = encode_json({"a": text, "b": msgspec.Raw(b'[1,{"c":2}]')})
    assert written.isascii()
    assert json.loads(written) == {"a": text, "b": [1, {"c": 2}]}
