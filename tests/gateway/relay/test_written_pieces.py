"""The quick way to write a chunk writes what the general way does, whatever the text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.engine_http import Admitted, Delta, ThoughtStart
from stageline_gateway.endpoints.json_answers import encode_json, sse_event
from stageline_gateway.endpoints.written_pieces import WrittenPieces
from stageline_gateway.openai_api.answer_shapes import AnswerShape, ChatShape, CompletionShape, Stamp

STAMP = Stamp("cmpl-1", 1_700_000_000, "ünï/model \u2028", "fp_1")
TEXTS = st.lists(st.text(st.characters(codec=None)), min_size=1, max_size=4)
NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def shapes(kind: str) -> list[AnswerShape]:
    """Two choices."""
    made: list[AnswerShape] = (
        [ChatShape(0), ChatShape(1)] if kind == "chat" else [CompletionShape(0), CompletionShape(1)]
    )
    for shape in made:
        shape.admitted(Admitted(prompt_tokens=1))
    return made


def chunks(written: bytes) -> list[Any]:
    """The data of each event."""
    return [json.loads(block.removeprefix(b"data: ")) for block in written.split(b"\n\n") if block]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
@given(texts=TEXTS)
def test_chunks_are_those_of_the_general_way(kind: str, include_usage: bool, texts: list[str]) -> None:
    pieces = WrittenPieces(STAMP, shapes(kind), with_logprobs=False, include_usage=include_usage)
    general = shapes(kind)
    for index, text in enumerate(texts):
        choice = index % 2
        written = pieces.delta(choice, Delta(text=text, token_ids=(1,)))
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        expected = [
            sse_event(STAMP.envelope(general[0].chunk_kind, [one]) | usage)
            for one in general[choice].piece(text, None)
            if text
        ]
        assert written == b"".join(expected)
        assert written.isascii()


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_what_is_written_ahead_is_what_would_have_been_written(kind: str) -> None:
    def written(*, is_ahead: bool) -> bytes:
        pieces = WrittenPieces(STAMP, shapes(kind)[:1], with_logprobs=False, include_usage=False)
        if is_ahead:
            pieces.write_ahead()
            assert pieces._openings is not None
        return pieces.openings() + pieces.delta(0, Delta(text="a", token_ids=(1,)))

    assert written(is_ahead=True) == written(is_ahead=False)


def test_a_prompt_that_is_echoed_is_not_kept_for_the_stream_and_nothing_is_of_several_choices() -> None:
    echoing = WrittenPieces(STAMP, [CompletionShape(0, echo="x" * 1000)], with_logprobs=False, include_usage=False)
    several = WrittenPieces(STAMP, shapes("chat"), with_logprobs=False, include_usage=False)
    for pieces in (echoing, several):
        pieces.write_ahead()
        assert pieces._openings is None
    assert b"xxx" in echoing.openings()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_thoughts_are_split_for_each_piece(is_ahead: bool) -> None:
    """Their pieces look different, so there is no quick way; that the engine tells of them is not known ahead."""
    shape = ChatShape(0)
    pieces = WrittenPieces(STAMP, [shape], with_logprobs=False, include_usage=False)
    if is_ahead:
        pieces.write_ahead()
    shape.admitted(Admitted(prompt_tokens=1, thoughts=ThoughtStart.OPEN))
    written = b"".join(pieces.delta(0, Delta(text=text, token_ids=(1,))) for text in ("so", "</think>", "yes", "!"))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(written)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes!"


@given(VALUES)
def test_json_is_ascii_and_comes_back_as_it_was(value: Any) -> None:
    assert encode_json(value).isascii()
    assert json.loads(encode_json(value)) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_numbers_that_json_has_not_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_json(value)


def test_a_lone_surrogate_is_escaped() -> None:
    assert encode_json({"a": "\ud800"}) == b'{"a":"\\ud800"}'
