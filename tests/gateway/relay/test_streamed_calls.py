"""Calls are found as they are written, however an answer is cut into pieces; what is no call stays text."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.cpu_bounds import CpuBound
from stageline_api.engine_http import ToolCallFormat
from stageline_gateway.openai_api.streamed_calls import StreamedCalls
from stageline_gateway.openai_api.tool_calls import ArgumentsPiece, Call

NAMES = {"f", "weather"}
Found = tuple[str, list[tuple[str, str]]]


def read(form: ToolCallFormat | None, pieces: list[str], is_cut: bool = False) -> Found:
    """All text and all calls of an answer that comes in `pieces`; `is_cut`: the token limit ended it."""
    reader = StreamedCalls(form, NAMES)
    text, calls = "", list[tuple[str, str]]()
    for one in [found for piece in pieces for found in reader.push(piece)] + reader.finish(is_cut):
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
    (ARRAY, '[1, 2, {"a": "}"}]', ('[1, 2, {"a": "}"}]', [])),
    (TAGGED, '<tool_call>{"name": "g"}</tool_call>', ('<tool_call>{"name": "g"}</tool_call>', [])),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {}}\n</tool', ("", [F])),
    (None, '[{"name":"f","arguments":{}},{"name":"f","argu', (',{"name":"f","argu', [F])),
    (None, '[{"name":"f","arguments":{"x":"a}]\\"{"}}]', ("", [("f", '{"x":"a}]\\"{"}')])),
    (None, '[{"name":"f","arguments":{"x":', ("", [("f", '{"x":')])),
    (None, "", ("", [])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer", "expected"), ANSWERS, ids=lambda value: ascii(value)[:50])
@given(cuts=st.sets(st.integers(0, 130)))
def test_any_cut_gives_the_same(form: ToolCallFormat | None, answer: str, expected: Found, cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(answer)), len(answer)]
    assert read(form, [answer[start:end] for start, end in pairwise(edges)]) == expected


PLACE = '{"place": "Os'
CUT_ANSWERS: list[tuple[ToolCallFormat | None, str, Found]] = [
    (TAGGED, "a < b <", ("a < b <", [])),
    (TAGGED, "So: <tool", ("So: ", [])),
    (TAGGED, "So: <tool_call>", ("So: ", [])),
    (TAGGED, 'So: <tool_call>\n{"nam', ("So: ", [])),
    (TAGGED, 'So: <tool_call>{"name": "wea', ("So: ", [])),
    (TAGGED, 'So: <tool_call>{"name": "f"', ("So: ", [("f", "")])),
    (TAGGED, 'So: <tool_call>{"name": "f", "arguments": "{', ("So: ", [("f", "")])),
    (TAGGED, 'So: <tool_call>{"arguments": {"place": 1}, "na', ("So: ", [])),
    (TAGGED, 'So: <tool_call>{"arguments": {}, "name": "f"}\n</tool', ("So: ", [F])),
    (TAGGED, 'So: <tool_call>{"id": 7, "name": "f"', ("So: ", [])),
    (TAGGED, f'<tool_call>{{"name": "weather", "arguments": {PLACE}', ("", [("weather", PLACE)])),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {}, "id": "c', ("", [F])),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {}}\n</tool_c', ("", [F])),
    (TAGGED, f"{TAGGED_OSLO}\n<tool_call>", ("", [OSLO])),
    (TAGGED, f"{TAGGED_OSLO} Done. B", (" Done. B", [OSLO])),
    (TAGGED, '<tool_call>{"name": "g", "ar', ('<tool_call>{"name": "g", "ar', [])),
    (TAGGED, "Write <tool_call> before a call", ("Write <tool_call> before a call", [])),
    (OBJECT, "{", ("", [])),
    (OBJECT, '{"type": "func', ("", [])),
    (OBJECT, '{"type": "circle", "r": 1', ('{"type": "circle", "r": 1', [])),
    (OBJECT, '{"parameters": {"place"', ("", [])),
    (OBJECT, '{"answer": 4, "b', ('{"answer": 4, "b', [])),
    (OBJECT, '{"name": "Bob", "age": 4', ('{"name": "Bob", "age": 4', [])),
    (OBJECT, '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"a', ("", [F, ("f", '{"a')])),
    (OBJECT, "\n", ("\n", [])),
    (ARRAY, "[1, 2", ("[1, 2", [])),
    (None, "[", ("", [])),
    (None, '[{"na', ("", [])),
    (None, '[{"name":"weather","arguments":{"place"', ("", [("weather", '{"place"')])),
    (None, '[{"name":"f","arguments":{}},{"name":"f","argu', ("", [F, ("f", "")])),
    (None, '[{"name":"f","arguments":{}},', ("", [F])),
]


@pytest.mark.parametrize(("form", "answer", "expected"), CUT_ANSWERS, ids=lambda value: ascii(value)[:50])
@given(cuts=st.sets(st.integers(0, 130)))
def test_of_a_call_that_the_limit_cut_off_only_what_is_known_is_told(
    form: ToolCallFormat | None, answer: str, expected: Found, cuts: set[int]
) -> None:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(answer)), len(answer)]
    assert read(form, [answer[start:end] for start, end in pairwise(edges)], is_cut=True) == expected


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


def test_text_before_a_call_is_not_held_back() -> None:
    reader = StreamedCalls(TAGGED, NAMES)
    assert [reader.push(piece) for piece in ("Hello ", "<", "b", "<tool")] == [["Hello "], [], ["<b"], []]


def test_a_whole_answer_of_many_calls_is_read_in_time_that_grows_with_it(cpu_bound: CpuBound) -> None:
    reader = StreamedCalls(TAGGED, NAMES)
    began = time.thread_time()
    found = reader.push('<tool_call>{"name": "f"}</tool_call>\n' * 20_000)
    spent = time.thread_time() - began
    assert len(found) == 20_000
    assert cpu_bound.holds(spent, 2.0), f"{spent:.2f} s of CPU"


def test_arguments_are_not_held_back() -> None:
    reader = StreamedCalls(TAGGED, NAMES)
    found: list[Any] = [reader.push(piece) for piece in ('<tool_call>{"name": "f", ', '"arguments": {"a', '": 1', "}}")]
    assert found[0] == []
    assert [type(one) for one in found[1]] == [Call, ArgumentsPiece]
    assert [found[1][1].text, *(one[0].text for one in found[2:])] == ['{"a', '": 1', "}"]
