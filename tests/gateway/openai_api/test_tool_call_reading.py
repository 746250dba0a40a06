"""Calls are found however an answer is cut into pieces, and what is no call stays text, character by character."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_api.engine_http import ToolCallFormat
from stageline_gateway.openai_api.tool_calls import Call, reader_for

NAMES = {"f", "weather"}
Found = tuple[str, list[tuple[str, str]]]


def read(form: ToolCallFormat | None, pieces: list[str]) -> Found:
    """All text and all calls of an answer that comes in `pieces`."""
    reader = reader_for(form, NAMES)
    found = [one for piece in pieces for one in reader.push(piece)] + reader.finish()
    text = "".join(one for one in found if isinstance(one, str))
    return text, [(one.name, one.arguments) for one in found if isinstance(one, Call)]


F = ("f", "{}")
OSLO = ("weather", '{"place": "Oslo"}')
TAGGED_OSLO = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
ANSWERS = [
    (ToolCallFormat.TAGGED, TAGGED_OSLO, ("", [OSLO])),
    (ToolCallFormat.TAGGED, f"Let me see.\n{TAGGED_OSLO}\n{TAGGED_OSLO}\n", ("Let me see.\n", [OSLO, OSLO])),
    (ToolCallFormat.TAGGED, '<tool_call>{"name": "f"}</tool_call>', ("", [F])),
    (ToolCallFormat.TAGGED, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', ("", [F])),
    (ToolCallFormat.TAGGED, "a < b <tool_ <tool_call", ("a < b <tool_ <tool_call", [])),
    (ToolCallFormat.TAGGED, "<tool_call>not JSON</tool_call>", ("<tool_call>not JSON</tool_call>", [])),
    (ToolCallFormat.TAGGED, '<tool_call>{"name": "g"}</tool_call>', ('<tool_call>{"name": "g"}</tool_call>', [])),
    (ToolCallFormat.TAGGED, '<tool_call>{"name": "f"', ('<tool_call>{"name": "f"', [])),
    (ToolCallFormat.OBJECT, '{"name": "weather", "parameters": {"place": "Oslo"}}', ("", [OSLO])),
    (ToolCallFormat.OBJECT, ' {"name": "f", "parameters": {}}; {"name": "f"}', ("", [F, F])),
    (ToolCallFormat.OBJECT, "It rains {a lot}.", ("It rains {a lot}.", [])),
    (ToolCallFormat.OBJECT, '{"answer": 4} is it', ('{"answer": 4} is it', [])),
    (ToolCallFormat.ARRAY, '[{"name": "f", "arguments": {}}, {"name": "f"}]', ("", [F, F])),
    (ToolCallFormat.ARRAY, '[1, 2, {"a": "}"}]', ('[1, 2, {"a": "}"}]', [])),
    (None, '[{"name":"f","arguments":{"x":"a}]\\"{"}}]', ("", [("f", '{"x": "a}]\\"{"}')])),
    (None, '[{"name":"f","arguments":{"x":', ('[{"name":"f","arguments":{"x":', [])),
    (None, '[{"name":"f","arguments":{}},{"name":"f","argu', (',{"name":"f","argu', [F])),
    (None, "", ("", [])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer", "expected"), ANSWERS, ids=lambda value: ascii(value)[:50])
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


def test_text_before_a_call_is_not_held_back() -> None:
    reader = reader_for(ToolCallFormat.TAGGED, NAMES)
    assert [reader.push(piece) for piece in ("Hello ", "<", "b", "<tool")] == [["Hello "], [], ["<b"], []]
