"""Calls reach a stream's client as they are written, however the answer is cut; what is no call stays text."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline_api.engine_http import ToolCallFormat
from stageline_gateway.openai_api.streamed_calls import StreamedCalls
from stageline_gateway.openai_api.tool_calls import ArgumentsPiece, Call

NAMES = {"f", "weather"}
Found = tuple[str, list[tuple[str, str]]]


def read(form: ToolCallFormat | None, pieces: list[str]) -> Found:
    """All text and all calls of an answer that comes in `pieces`."""
    reader = StreamedCalls(form, NAMES)
    text, calls = "", list[tuple[str, str]]()
    for one in [found for piece in pieces for found in reader.push(piece)] + reader.finish():
        match one:
            case str():
                text += one
            case Call():
                calls.append((one.name, one.arguments))
            case ArgumentsPiece(text=more):
                name, arguments = calls.pop()
                calls.append((name, arguments + more))
    return text, calls


F = ("f", "{}")
TAGGED, OBJECT, ARRAY = ToolCallFormat.TAGGED, ToolCallFormat.OBJECT, ToolCallFormat.ARRAY
OSLO = ("weather", '{"place": "Os}lo"}')
TAGGED_OSLO = '<tool_call>\n{"name": "weather", "arguments": {"place": "Os}lo"}}\n</tool_call>'
ANSWERS: list[tuple[ToolCallFormat | None, str, Found]] = [
    (TAGGED, TAGGED_OSLO, ("", [OSLO])),
    (TAGGED, f"Let me see.\n{TAGGED_OSLO}\n{TAGGED_OSLO}\n", ("Let me see.\n", [OSLO, OSLO])),
    (TAGGED, '<tool_call>{"name": "f"}</tool_call>', ("", [F])),
    (TAGGED, '<tool_call>{"arguments": {}, "name": "f"}</tool_call>', ("", [F])),
    (TAGGED, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', ("", [F])),
    (TAGGED, "a < b <tool_ <tool_call", ("a < b <tool_ <tool_call", [])),
    (TAGGED, "<tool_call>not JSON</tool_call>", ("<tool_call>not JSON</tool_call>", [])),
    (TAGGED, '<tool_call>{"name": "g", "a"</tool_call>', ('<tool_call>{"name": "g", "a"</tool_call>', [])),
    (TAGGED, '<tool_call>{"name": "f"', ('<tool_call>{"name": "f"', [])),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {"a', ("", [("f", '{"a')])),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>b', ("b", [("f", '{"a": 1')])),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {}} and</tool_call>', ("} and", [F])),
    (TAGGED, f"{TAGGED_OSLO} Done. Bye.\n{TAGGED_OSLO}\n", (" Done. Bye.\n", [OSLO, OSLO])),
    (TAGGED, f"{TAGGED_OSLO}\n <tool", ("\n <tool", [OSLO])),
    (OBJECT, '{"name": "f", "parameters": {}} It is done.', (" It is done.", [F])),
    (OBJECT, '{"name": "weather", "parameters": {"place": "Os}lo"}}', ("", [OSLO])),
    (OBJECT, ' {"name": "f", "parameters": {}}; {"name": "f"}', ("", [F, F])),
    (OBJECT, "It rains {a lot}.", ("It rains {a lot}.", [])),
    (OBJECT, '{"answer": 4} is it', ('{"answer": 4} is it', [])),
    (ARRAY, '[{"name": "f", "arguments": {}}, {"name": "f"}]', ("", [F, F])),
    (ARRAY, "[1, 2]", ("[1, 2]", [])),
    (None, '[{"name":"f","arguments":{"x":"a}]\\"{"}}]', ("", [("f", '{"x":"a}]\\"{"}')])),
    (None, '[{"name":"f","arguments":{"x":', ("", [("f", '{"x":')])),
    (None, "", ("", [])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer", "expected"), ANSWERS, ids=lambda value: ascii(value)[:50])
@settings(max_examples=30)
@given(cuts=st.sets(st.integers(0, 130)))
def test_any_cut_gives_the_same(form: ToolCallFormat | None, answer: str, expected: Found, cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(answer)), len(answer)]
    assert read(form, [answer[start:end] for start, end in pairwise(edges)]) == expected


@given(
    form=st.sampled_from([*ToolCallFormat, None]),
    pieces=st.lists(st.text(alphabet='<>/tool_ca{}[]"\\ f:,', max_size=12)),
)
def test_what_is_no_call_is_never_lost(form: ToolCallFormat | None, pieces: list[str]) -> None:
    text, calls = read(form, pieces)
    assert calls or text == "".join(pieces)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    form=st.sampled_from([*ToolCallFormat, None]),
    arguments=st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    escaped=st.booleans(),
)
def test_any_arguments_come_back_as_they_were(
    form: ToolCallFormat | None, arguments: dict[str, Any], escaped: bool
) -> None:
    call = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=escaped)
    answer = {TAGGED: f"<tool_call>{call}</tool_call>", OBJECT: call}.get(form, f"[{call}]") if form else f"[{call}]"
    text, calls = read(form, list(answer))
    assert (text, [(name, json.loads(found)) for name, found in calls]) == ("", [("f", arguments)])


def test_arguments_are_not_held_back() -> None:
    reader = StreamedCalls(TAGGED, NAMES)
    found: list[Any] = [reader.push(piece) for piece in ('<tool_call>{"name": "f", ', '"arguments": {"a', '": 1', "}}")]
    assert found[0] == []
    assert [type(one) for one in found[1]] == [Call, ArgumentsPiece]
    assert [found[1][1].text, *(one[0].text for one in found[2:])] == ['{"a', '": 1', "}"]
