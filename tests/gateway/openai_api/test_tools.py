"""Tools through the official client: what the engine is asked, and how calls come back, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

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
    ToolCallFormat,
)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place",
        "parameters": {"properties": {"place": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": {"type": "string"}}},
    },
}
TIME: Any = {"type": "function", "function": {"name": "time"}}
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Rain in Oslo?"}], "tools": [WEATHER, TIME]}


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def says(
    text: str, form: ToolCallFormat | None = None, size: int = 7, reason: FinishReason = FinishReason.STOP
) -> list[Step]:
    """An answer of `text` in pieces of `size` characters."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    deltas = [Say(Delta(text=piece, token_ids=(index,))) for index, piece in enumerate(pieces)]
    end = Finished(reason=reason, prompt_tokens=3, completion_tokens=len(pieces))
    return [Say(Admitted(prompt_tokens=3, tool_call_format=form)), *deltas, Say(end)]


def answer(client: OpenAI, stream: bool, **extra: Any) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Content, calls and finish reason, asked for whole or streamed."""
    if not stream:
        choice = client.chat.completions.create(**ASK, **extra).choices[0]
        calls: list[Any] = list(choice.message.tool_calls or [])
        return choice.message.content, [(c.function.name, c.function.arguments) for c in calls], choice.finish_reason
    content, named, reason = "", dict[int, list[str]](), None
    for chunk in client.chat.completions.create(**ASK, **extra, stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            assert (call.id is not None) == (call.index not in named), "an id, once"
            one = named.setdefault(call.index, [call.function.name or "", ""])
            one[1] += call.function.arguments or ""
    return content or None, [(name, arguments) for name, arguments in named.values()], reason


TAGGED = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_the_models_own_calls_are_found(client: OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = lambda _: says(TAGGED, ToolCallFormat.TAGGED)
    assert answer(client, stream) == ("Let me see. ", [("weather", '{"place": "Oslo"}')], "tool_calls")
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool.name for tool in prompt.tools] == ["weather", "time"]
    assert not prompt.tools_guided
    assert engine.requests[0].sampling.json_schema is None


def test_arguments_of_the_models_own_call_stream(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: says(TAGGED, ToolCallFormat.TAGGED)
    chunks = client.chat.completions.create(**ASK, stream=True)
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    written = [one.function.arguments or "" for one in deltas if one.function is not None]
    assert len([piece for piece in written if piece]) > 2, written
    assert "".join(written) == '{"place": "Oslo"}'


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_calls_is_text(client: OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = lambda _: says("It is dry <today>.", ToolCallFormat.TAGGED)
    assert answer(client, stream) == ("It is dry <today>.", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_are_held_to_a_schema(client: OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    calls = '[{"name":"time","arguments":{}}, {"name":"weather","arguments":{"place":"Oslo"}}]'
    engine.script = lambda _: says(calls)
    content, called, reason = answer(client, stream, tool_choice="required")
    assert (content, reason) == (None, "tool_calls")
    assert [(name, json.loads(written)) for name, written in called] == [("time", {}), ("weather", {"place": "Oslo"})]
    schema = json.loads(engine.requests[0].sampling.json_schema or "")
    weather, time = schema["items"]["anyOf"]
    assert weather["properties"]["name"] == {"const": "weather"}
    moved = weather["properties"]["arguments"]["properties"]["place"]["$ref"]
    assert moved == "#/items/anyOf/0/properties/arguments/$defs/Place"
    assert time["properties"]["arguments"] == {"type": "object"}
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools_guided


def test_one_call_when_parallel_ones_are_not_wanted(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: says("[]")
    answer(client, False, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(engine.requests[0].sampling.json_schema or "")["maxItems"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_functions_arguments_are_the_answer(client: OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = lambda _: says('{"place":"Oslo"}')
    found = answer(client, stream, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert found == (None, [("weather", '{"place":"Oslo"}')], "tool_calls")
    schema = json.loads(engine.requests[0].sampling.json_schema or "")
    assert schema == {"type": "object"} | WEATHER["function"]["parameters"]


def test_a_call_cut_by_the_token_limit_says_so(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: says('[{"name":"time","argu', reason=FinishReason.LENGTH)
    assert answer(client, True, tool_choice="required")[2] == "length"


def test_none_hides_the_tools(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: says(TAGGED)
    assert answer(client, False, tool_choice="none") == (TAGGED, [], "stop")
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == ()


def test_results_of_calls_go_back_to_the_model(client: OpenAI, engine: ScriptedEngine) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "CET"}'}}
    turns: Any = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    client.chat.completions.create(**(ASK | {"messages": turns}))
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    _, asked, told = prompt.messages
    assert (asked.content, asked.tool_calls[0].arguments) == ("", {"zone": "CET"})
    assert (told.role, told.tool_call_id, told.content) == ("tool", "c1", "noon")


def test_a_model_that_can_not_choose_says_so(client: OpenAI, engine: ScriptedEngine) -> None:
    refusal = EngineError(code=ErrorCode.INVALID_VALUE, message="no place for tools", param="tools")
    engine.script = lambda _: [Refuse(400, refusal)]
    with pytest.raises(openai.BadRequestError, match="no place for tools") as refused:
        answer(client, False)
    assert refused.value.param == "tools"


def test_a_schema_the_engine_refuses_is_named_as_tools(client: OpenAI, engine: ScriptedEngine) -> None:
    refusal = EngineError(code=ErrorCode.INVALID_VALUE, message="The JSON schema can't guide", param="response_format")
    engine.script = lambda _: [Refuse(400, refusal)]
    with pytest.raises(openai.BadRequestError) as refused:
        answer(client, False, tool_choice="required")
    assert refused.value.param == "tools"
