"""The second turn of a chat, as clients send it: the answer's own message comes back with all that they added to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import (
    Admitted,
    ChatPrompt,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    ToolCallFormat,
)
from stageline_gateway.settings import GatewaySettings

USER: Any = {"role": "user", "content": "Where?"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"type": "string"}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "place", "parameters": SCHEMA, "strict": True}}
RESPONSE_TOOL: Any = {"type": "function", "name": "place", "parameters": SCHEMA, "strict": True}
ARGUMENTS = '{"town": "Oslo"}'
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "place", "arguments": ARGUMENTS}}


class Town(BaseModel):
    """What an answer is parsed to."""

    town: str


def calls_or_tells(request: GenerateRequest) -> list[Step]:
    """A call where a user asks and tools are offered, else an object."""
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    if not prompt.tools or prompt.messages[-1].role != "user":
        return answer(*ARGUMENTS)
    text = f'So. <tool_call>{{"name": "place", "arguments": {ARGUMENTS}}}</tool_call>'
    pieces = [Say(Delta(text=text[at : at + 7], token_ids=(at,))) for at in range(0, len(text), 7)]
    end = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=len(pieces))
    return [Say(Admitted(prompt_tokens=3, tool_call_format=ToolCallFormat.TAGGED)), *pieces, Say(end)]


@pytest.fixture(autouse=True)
def script(engine: ScriptedEngine) -> None:
    engine.script = calls_or_tells


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def created(client: OpenAI, **asked: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[USER], **asked).choices[0].message


def parsed(client: OpenAI, **asked: Any) -> Any:
    return client.chat.completions.parse(model=MODEL, messages=[USER], **asked).choices[0].message


def streamed(client: OpenAI, **asked: Any) -> Any:
    with client.chat.completions.stream(model=MODEL, messages=[USER], **asked) as stream:
        return stream.get_final_completion().choices[0].message


@pytest.mark.parametrize("dumped", [False, True])
@pytest.mark.parametrize("ask", [created, parsed, streamed])
def test_a_message_of_the_official_client_can_be_sent_back(
    client: OpenAI, engine: ScriptedEngine, ask: Any, dumped: bool
) -> None:
    message = ask(client)
    turns = [USER, message.model_dump() if dumped else message, USER]
    again = client.chat.completions.with_raw_response.create(model=MODEL, messages=turns)
    assert "x-stageline-ignored" not in again.headers, "null asks for nothing"
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(turn.role, turn.content) for turn in prompt.messages][1] == ("assistant", ARGUMENTS)


@pytest.mark.parametrize("dumped", [False, True])
@pytest.mark.parametrize("ask", [created, parsed, streamed])
def test_so_can_one_with_calls(client: OpenAI, engine: ScriptedEngine, ask: Any, dumped: bool) -> None:
    message = ask(client, tools=[TOOL])
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "wet"}
    turns = [USER, message.model_dump() if dumped else message, result]
    again = client.chat.completions.with_raw_response.create(model=MODEL, messages=turns, tools=[TOOL])
    arguments, index = "messages.tool_calls.function.parsed_arguments", "messages.tool_calls.index"
    left_out = {created: set[str](), parsed: {arguments}, streamed: {arguments, index}}[ask]
    assert set(again.headers["x-stageline-ignored"].split(",")) == left_out | {"tools.function.strict"}
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].tool_calls[0].arguments == {"town": "Oslo"}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own, as it sends
def test_so_can_one_that_was_parsed(client: OpenAI) -> None:
    message = parsed(client, response_format=Town)
    assert message.parsed == Town(town="Oslo")
    turns = [USER, message, USER]
    again = client.chat.completions.with_raw_response.create(model=MODEL, messages=turns)
    assert again.headers["x-stageline-ignored"] == "messages.parsed"


def test_so_can_calls_that_a_client_put_together_from_a_stream(client: OpenAI) -> None:
    """As OpenAI's guide to function calling does it."""
    calls: dict[int, Any] = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=[USER], tools=[TOOL], stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.index in calls:
                calls[call.index].function.arguments += call.function.arguments if call.function else ""
            else:
                calls[call.index] = call
    turns: list[Any] = [
        USER,
        {"role": "assistant", "tool_calls": list(calls.values())},
        {"role": "tool", "tool_call_id": calls[0].id, "content": "wet"},
    ]
    again = client.chat.completions.with_raw_response.create(model=MODEL, messages=turns, tools=[TOOL])
    assert again.headers["x-stageline-ignored"] == "messages.tool_calls.index,tools.function.strict"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_so_can_the_items_of_a_parsed_response(client: OpenAI, engine: ScriptedEngine, is_streamed: bool) -> None:
    if is_streamed:
        with client.responses.stream(model=MODEL, input=[USER], tools=[RESPONSE_TOOL]) as stream:
            first = stream.get_final_response()
    else:
        first = client.responses.parse(model=MODEL, input=[USER], tools=[RESPONSE_TOOL])
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    turns: list[Any] = [USER, *first.output, result]
    assert client.responses.create(model=MODEL, input=turns, tools=[RESPONSE_TOOL]).output_text == ARGUMENTS
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1].tool_calls[0].arguments == {"town": "Oslo"}


def body(message: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER, {"role": "assistant"} | message, USER]} | more


def with_calls(**fields: Any) -> dict[str, Any]:
    return body({"tool_calls": [CALL | fields]})


def with_tool(**fields: Any) -> dict[str, Any]:
    return body({"content": "x"}, tools=[{"type": "function", "function": {"name": "place"}} | fields])


FUNCTION = {"name": "place", "arguments": ARGUMENTS}
ADDED: list[tuple[dict[str, Any], str]] = [
    (body({"content": "x", "parsed": {"town": "Oslo"}}), "messages.parsed"),
    (body({"content": "x", "thinking_blocks": [{"type": "thinking"}]}), "messages.thinking_blocks"),
    (with_calls(index=0), "messages.tool_calls.index"),
    (with_calls(extra_content={"google": {}}), "messages.tool_calls.extra_content"),
    (
        with_calls(function=FUNCTION | {"parsed_arguments": {"town": "Oslo"}}),
        "messages.tool_calls.function.parsed_arguments",
    ),
    (with_tool(cache_control={"type": "ephemeral"}), "tools.cache_control"),
    (with_tool(defer_loading=True), "tools.defer_loading"),
    (with_tool(function={"name": "place", "cache_control": {}}), "tools.function.cache_control"),
    (with_tool(function={"name": "place", "eager_input_streaming": True}), "tools.function.eager_input_streaming"),
]
NULL = [
    body({"content": "x", "unheard_of": None}),
    body({"content": [{"type": "text", "text": "x", "unheard_of": None}]}),
    with_calls(unheard_of=None),
    with_calls(function=FUNCTION | {"unheard_of": None}),
    with_tool(unheard_of=None),
    with_tool(function={"name": "place", "unheard_of": None}),
]


@pytest.mark.parametrize(("sent", "named"), ADDED, ids=lambda value: ascii(value)[-40:])
def test_what_client_libraries_add_is_named(gateway: RunningGateway, sent: dict[str, Any], named: str) -> None:
    answered = gateway.http.post("/v1/chat/completions", json=sent)
    assert (answered.status_code, answered.headers.get("x-stageline-ignored")) == (200, named), answered.text


@pytest.mark.parametrize("sent", NULL, ids=lambda value: ascii(value)[-40:])
def test_null_in_a_field_that_nobody_knows_asks_for_nothing(gateway: RunningGateway, sent: dict[str, Any]) -> None:
    answered = gateway.http.post("/v1/chat/completions", json=sent)
    assert (answered.status_code, "x-stageline-ignored" in answered.headers) == (200, False), answered.text


def test_null_asks_for_nothing_in_the_other_apis_either(gateway: RunningGateway) -> None:
    more = {"unheard_of": None}
    function = {"type": "function", "name": "place"}
    items = [USER | more, {"type": "function_call", "call_id": "c", "name": "place", "arguments": "{}"} | more]
    response = {"model": MODEL, "input": items, "tools": [function | more]}
    blocks: list[dict[str, Any]] = [
        {"type": "text", "text": "x"},
        {"type": "tool_use", "id": "c", "name": "place", "input": {}},
    ]
    turns = [USER | more, {"role": "assistant", "content": [block | more for block in blocks]}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [blocks[0] | more], "is_error": None}
    message = {"messages": [*turns, {"role": "user", "content": [result]}], "system": [blocks[0] | more]}
    tools = [{"name": "place", "input_schema": {}} | more]
    for path, sent in (
        ("/v1/responses", response),
        ("/v1/messages", {"model": MODEL, "max_tokens": 9, "tools": tools} | message),
    ):
        answered = gateway.http.post(path, json=sent)
        assert (answered.status_code, "x-stageline-ignored" in answered.headers) == (200, False), answered.text


def test_null_is_no_value_where_one_is_required(gateway: RunningGateway) -> None:
    answered = gateway.http.post("/v1/chat/completions", json=with_calls(id=None))
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, "messages[1].tool_calls[0].id")


@pytest.mark.parametrize("value", [1, "x", False, [], {}])
def test_a_field_that_nobody_knows_is_refused_with_any_other_value(gateway: RunningGateway, value: Any) -> None:
    for sent in (
        with_calls(unheard_of=value),
        with_tool(unheard_of=value),
        body({"content": "x", "unheard_of": value}),
    ):
        answered = gateway.http.post("/v1/chat/completions", json=sent)
        assert (answered.status_code, answered.json()["error"]["code"]) == (400, "unknown_parameter")


def test_a_strict_gateway_refuses_them_all(tmp_path: Path, engine: ScriptedEngine) -> None:
    with running_gateway(GatewaySettings(tmp_path / "endpoints.json", strict_fields=True)) as gateway:
        gateway.serve(group(engine.url))
        for sent in (*(sent for sent, _ in ADDED), *NULL):
            answered = gateway.http.post("/v1/chat/completions", json=sent)
            assert (answered.status_code, answered.json()["error"]["code"]) == (400, "unknown_parameter"), sent
    assert engine.requests == []


def test_a_call_without_arguments_may_come_back_as_an_empty_text(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "place", "arguments": ""}
    for path, sent in (
        ("/v1/chat/completions", with_calls(function=FUNCTION | {"arguments": ""})),
        ("/v1/responses", {"model": MODEL, "input": [USER, item]}),
    ):
        answered = gateway.http.post(path, json=sent)
        assert answered.status_code == 200, answered.text
        prompt = engine.requests[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.messages[1].tool_calls[0].arguments == {}
