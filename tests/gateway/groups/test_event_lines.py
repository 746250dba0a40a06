"""An engine's lines as events: what came together is one piece, and nothing else changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stageline_api.engine_http import (
    Admitted,
    Delta,
    Event,
    Finished,
    FinishReason,
    ThoughtStart,
    TokenLogprob,
    ToolCallFormat,
)
from stageline_gateway.engine_client.event_lines import EventLines

ADMITTED = Admitted(prompt_tokens=1)
END = Finished(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=3)
LOGPROB = TokenLogprob(token_id=1, bytes=(97,), logprob=-0.5, top_logprobs=())

PIECES = st.builds(Delta, text=st.text(max_size=5), token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple))
READS = st.lists(st.lists(PIECES, max_size=4), max_size=4)


def lines(*events: Event) -> list[bytes]:
    return [event.model_dump_json().encode() for event in events]


@given(READS)
def test_of_one_read_there_is_one_piece_with_all_text_and_tokens(reads: list[list[Delta]]) -> None:
    reader = EventLines()
    assert list(reader.events(lines(ADMITTED))) == [ADMITTED]
    for pieces in reads:
        found = list(reader.events(lines(*pieces)))
        assert len(found) == bool(pieces)
        for one in found:
            assert one == Delta(
                text="".join(piece.text for piece in pieces),
                token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            )


def test_other_events_keep_their_place() -> None:
    a, b, c = (Delta(text=text, token_ids=(index,)) for index, text in enumerate("abc"))
    found = list(EventLines().events(lines(ADMITTED, a, b, END, c)))
    assert found == [ADMITTED, Delta(text="ab", token_ids=(0, 1)), END, c]


@pytest.mark.parametrize(
    "admitted",
    [
        Admitted(prompt_tokens=1, thoughts=ThoughtStart.TAGGED),
        Admitted(prompt_tokens=1, tool_call_format=ToolCallFormat.TAGGED),
    ],
    ids=["thoughts", "calls"],
)
def test_where_more_than_text_is_looked_for_every_piece_stays(admitted: Admitted) -> None:
    said: list[Event] = [admitted, Delta(text="a", token_ids=(1,)), Delta(text="b", token_ids=(2,)), END]
    assert list(EventLines().events(lines(*said))) == said


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"admitted","prompt_tokens":3}',
        b'{"type":"admitted","prompt_tokens":3,"ignored":["a"]}',
        b'{"type":"admitted","prompt_tokens":3,"thoughts":null,"tool_call_format":null,"ignored":[]}',
        b'{"type":"admitted","prompt_tokens":3.0}',
        b'{"prompt_tokens":3,"type":"admitted"}',
    ],
)
def test_an_admission_is_read_as_its_type_says(line: bytes) -> None:
    assert list(EventLines().events([line])) == [Admitted.model_validate_json(line)]


@pytest.mark.parametrize("line", [b'{"type":"admitted"}', b'{"type":"admitted","prompt_tokens":3,"more":1}'])
def test_an_admission_that_its_type_refuses_is_refused(line: bytes) -> None:
    with pytest.raises(ValidationError):
        list(EventLines().events([line]))


def test_log_probabilities_stay_with_their_piece() -> None:
    told = Delta(text="b", token_ids=(2,), logprobs=(LOGPROB,))
    said: list[Event] = [ADMITTED, Delta(text="a", token_ids=(1,)), told, Delta(text="c", token_ids=(3,)), END]
    assert list(EventLines().events(lines(*said))) == said


@pytest.mark.parametrize(
    "wrong",
    [
        b"nonsense",
        b'{"type":"delta","text":"x","token_ids":[1.5]}',
        b'{"type":"delta","text":"x"}',
        b'{"type":"delta","text":"x","token_ids":[],"more":1}',
        json.dumps({"type": "delta", "text": "x", "token_ids": [], "logprobs": [{}]}).encode(),
        b'{"type":"unheard of"}',
        b'{"type":"delta","text":"\xff","token_ids":[]}',
        b'{"type":"delta","text":"","token_ids":[],"logprobs":' + b"[" * 5000,
    ],
)
def test_a_line_that_can_not_be_read_fails_behind_those_before_it(wrong: bytes) -> None:
    a = Delta(text="a", token_ids=(1,))
    found = EventLines().events([*lines(ADMITTED, a), wrong])
    assert [next(found), next(found)] == [ADMITTED, a]
    with pytest.raises(ValidationError):
        next(found)
