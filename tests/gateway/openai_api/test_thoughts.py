"""What a reasoning model thinks comes apart from its answer, whole and streamed, with and without calls."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from oracles.tokenizer_models import write_byte_level
from processes.cpu_bounds import CpuBound
from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import Refuse, Say, ScriptedEngine, Step
from stageline_api.engine_http import (
    Admitted,
    ChatPrompt,
    Delta,
    EngineError,
    ErrorCode,
    Finished,
    FinishReason,
    GenerateRequest,
    ThoughtStart,
    ToolCallFormat,
)
from stageline_gateway.openai_api.thoughts import ThoughtReader
from stageline_runtime.engine.text.prompts import PromptReader

TAGGED, OPEN = ThoughtStart.TAGGED, ThoughtStart.OPEN
ANSWERS = [
    (TAGGED, "<think>\nHm, a < b\n</think>\n\nIt is 4.", ("Hm, a < b", "It is 4.")),
    (TAGGED, " <think></think>4", ("", "4")),
    (TAGGED, "It is </think> 4.", ("", "It is </think> 4.")),
    (TAGGED, "\n<thin", ("", "\n<thin")),
    (TAGGED, "<think>cut </thi", ("cut </thi", "")),
    (OPEN, "Hm\n</think>4", ("Hm", "4")),
    (OPEN, "a\n\nb </think> 4 </think>", ("a\n\nb", "4 </think>")),
    (OPEN, "cut ", ("cut ", "")),
    (OPEN, "", ("", "")),
    (TAGGED, " " * 64 + "<think>a</think>b", ("a", "b")),
    (TAGGED, " " * 65 + "<think>", ("", " " * 65 + "<think>")),
    (OPEN, "a" + "\n" * 70 + "</think>b", ("a" + "\n" * 6, "b")),
    (OPEN, "a" + "\n" * 70 + "b", ("a" + "\n" * 70 + "b", "")),
]


@pytest.mark.parametrize(("start", "answer", "expected"), ANSWERS, ids=lambda value: ascii(value)[:40])
@given(cuts=st.sets(st.integers(0, 80)))
def test_any_cut_gives_the_same(start: ThoughtStart, answer: str, expected: tuple[str, str], cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(answer)), len(answer)]
    reader = ThoughtReader(start)
    parts = [reader.push(answer[a:b]) for a, b in pairwise(edges)] + [reader.finish()]
    assert ("".join(part for part, _ in parts), "".join(part for _, part in parts)) == expected


def test_thoughts_are_not_held_back() -> None:
    reader = ThoughtReader(OPEN)
    assert [reader.push(piece) for piece in ("Hm, ", "so", "</th", "ink>", "\n", "4")] == [
        ("Hm,", ""),
        (" so", ""),
        ("", ""),
        ("", ""),
        ("", ""),
        ("", "4"),
    ]


BLANKS = 100_000


@pytest.mark.parametrize(("start", "before"), [(TAGGED, ""), (OPEN, "Hm"), (TAGGED, "<think>Hm"), (TAGGED, "<think>")])
def test_blanks_without_end_cost_little_and_are_not_kept(start: ThoughtStart, before: str, cpu_bound: CpuBound) -> None:
    reader = ThoughtReader(start)
    reader.push(before)
    began = time.thread_time()
    told = [sum(map(len, reader.push(" "))) for _ in range(BLANKS)]
    spent = time.thread_time() - began
    assert cpu_bound.holds(spent, 6.0), f"{spent:.2f} s of CPU for {BLANKS} blanks"
    assert sum(told) >= (0 if before == "<think>" else BLANKS - 64)
    assert sum(map(len, reader.finish())) <= 64


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "2+2?"}]}
TOOL: Any = {"type": "function", "function": {"name": "add"}}


def thinks(text: str, form: ToolCallFormat | None = None) -> list[Step]:
    pieces = [Say(Delta(text=text[at : at + 5], token_ids=(at,))) for at in range(0, len(text), 5)]
    end = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=len(pieces))
    return [Say(Admitted(prompt_tokens=3, thoughts=TAGGED, tool_call_format=form)), *pieces, Say(end)]


def test_a_whole_answer_has_them_in_a_field_of_their_own(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: thinks("<think>Two and two.</think>\n4")
    message = client.chat.completions.create(**ASK, n=2).choices[1].message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "4")


def test_a_stream_has_them_first(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: thinks("<think>Two and two.</think>\n4")
    deltas = [chunk.choices[0].delta.model_dump() for chunk in client.chat.completions.create(**ASK, stream=True)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Two and two."
    assert "".join(delta["content"] or "" for delta in deltas) == "4"
    assert len([delta for delta in deltas if delta.get("reasoning_content")]) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_after_them(client: OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    text = '<think>Is <tool_call> a call?</think><tool_call>{"name": "add", "arguments": {}}</tool_call>'
    engine.script = lambda _: thinks(text, ToolCallFormat.TAGGED)
    if stream:
        chunks = client.chat.completions.create(**ASK, tools=[TOOL], stream=True)
        parts = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    else:
        parts = [client.chat.completions.create(**ASK, tools=[TOOL]).choices[0].message.model_dump()]
    assert "".join(part.get("reasoning_content") or "" for part in parts) == "Is <tool_call> a call?"
    assert [call["function"]["name"] for part in parts for call in part["tool_calls"] or [] if call["id"]] == ["add"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("begun", "expected"), [("<think>\nOkay, so", " it is 4."), ("<think>\n", "it is 4.")])
@pytest.mark.parametrize("extra", [{}, {"tools": [TOOL]}], ids=["no tools", "tools"])
def test_a_thought_that_goes_on_keeps_its_blanks(
    client: OpenAI, engine: ScriptedEngine, stream: bool, begun: str, expected: str, extra: Any
) -> None:
    begin = Say(Admitted(prompt_tokens=3, thoughts=OPEN, tool_call_format=ToolCallFormat.TAGGED))
    engine.script = lambda _: [begin, *thinks(" it is 4.\n</think>\n\nFour.")[1:]]
    asked: Any = {"messages": [*ASK["messages"], {"role": "assistant", "content": begun}], "model": MODEL} | extra
    told: Any = client.chat.completions.create(**asked, stream=stream, extra_body={"continue_final_message": True})
    if stream:
        parts = [chunk.choices[0].delta.model_dump() for chunk in told]
    else:
        parts = [told.choices[0].message.model_dump()]
    assert "".join(part.get("reasoning_content") or "" for part in parts) == expected
    assert "".join(part["content"] or "" for part in parts) == "Four."


OPENS_WITH_WORDS = (
    "{% for message in messages %}{{ message.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<think>\nOkay, {% endif %}{# </think> #}"
)


def reads(directory: Path, template: str, text: str) -> Callable[[GenerateRequest], list[Step]]:
    """An engine that says `text`, and of its thoughts what the engine's reader of prompts makes of `template`."""
    write_byte_level(directory, chat_template=template)
    reader = PromptReader.load(directory, vocab_size=260, max_model_len=4096, eos_token_ids=[1])

    def script(request: GenerateRequest) -> list[Step]:
        begin = Admitted(prompt_tokens=3, thoughts=reader.read(request).thoughts)
        return [Say(begin), *thinks(text)[1:]]

    return script


@pytest.mark.parametrize("asked", ["2+2?", "What is <think> for?", "Say <think>"])
def test_a_thought_that_the_template_begins_with_words_of_its_own_is_one(
    gateway: RunningGateway, client: OpenAI, engine: ScriptedEngine, tmp_path: Path, asked: str
) -> None:
    """The template's words are of the prompt, and no part of what is told."""
    engine.script = reads(tmp_path, OPENS_WITH_WORDS, "two and two.\n</think>\n\nIt is 4.")
    turns: Any = [{"role": "user", "content": asked}]
    message = client.chat.completions.create(model=MODEL, messages=turns).choices[0].message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("two and two.", "It is 4.")
    chunks = client.chat.completions.create(model=MODEL, messages=turns, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "two and two."
    assert "".join(delta["content"] or "" for delta in deltas) == "It is 4."
    response = client.responses.create(model=MODEL, input=asked)
    assert ([item.type for item in response.output], response.output_text) == (["reasoning", "message"], "It is 4.")
    body = {"model": MODEL, "max_tokens": 99, "messages": turns}
    blocks = gateway.http.post("/v1/messages", json=body).json()["content"]
    assert [block.get("thinking") or block["text"] for block in blocks] == ["two and two.", "It is 4."]


def test_responses_have_them_as_an_item(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: thinks("<think>Two and two.</think>It is 4.")
    asked: Any = {"model": MODEL, "input": "2+2?", "reasoning": {"effort": "low"}}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert "response.reasoning_text.delta" in kinds
    assert final.output_text == "It is 4."
    for answer in (final, client.responses.create(**asked)):
        assert answer.usage is not None
        # The sixth of seven tokens holds the end of the thoughts.
        assert (answer.usage.output_tokens_details.reasoning_tokens, answer.usage.output_tokens) == (6, 7)
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.reasoning_effort == "low"


def test_an_answer_without_thoughts_spends_no_tokens_on_them(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: thinks("< It is 4.")
    usage = client.responses.create(model=MODEL, input="2+2?").usage
    assert usage is not None
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_arguments_for_the_template_reach_the_engine(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=3, ignored=("reasoning_effort",))), *thinks("4")[1:]]
    told = {"enable_thinking": False, "budget": 3, "style": "terse"}
    body = ASK | {"chat_template_kwargs": told, "reasoning_effort": "high", "store": True}
    answered = gateway.http.post("/v1/chat/completions", json=body)
    assert answered.headers["x-stageline-ignored"] == "store,reasoning_effort"
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.template_arguments, prompt.reasoning_effort) == (told, "high")


@pytest.mark.parametrize(
    ("told", "param"),
    [
        ({"a": [1]}, "chat_template_kwargs.a"),
        ({"a": "x" * 1025}, "chat_template_kwargs.a"),
        ({"not a name": 1}, "chat_template_kwargs.not a name"),
        ({f"a{index}": 1 for index in range(17)}, "chat_template_kwargs"),
        ([1], "chat_template_kwargs"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_only_few_scalars_may_be_arguments(gateway: RunningGateway, told: Any, param: str) -> None:
    answered = gateway.http.post("/v1/chat/completions", json=ASK | {"chat_template_kwargs": told})
    assert answered.status_code == 400
    assert answered.json()["error"]["param"].startswith(param), answered.text


def test_arguments_that_are_not_the_clients_are_refused_by_name(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    refusal = EngineError(code=ErrorCode.INVALID_VALUE, message="not yours", param="chat_template_kwargs")
    engine.script = lambda _: [Refuse(400, refusal)]
    answered = gateway.http.post("/v1/chat/completions", json=ASK | {"chat_template_kwargs": {"messages": "x"}})
    assert answered.json()["error"]["param"] == "chat_template_kwargs"
