"""Fields that clients send and this server has no use for: named in a header, or refused where it is strict."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Say, ScriptedEngine
from stageline_api.engine_http import (
    Admitted,
    ChatPrompt,
    Delta,
    Finished,
    FinishReason,
    ThoughtStart,
    ToolCallFormat,
)
from stageline_gateway.openai_api.dialects.messages_request import MESSAGES_KNOWN, MessagesRequest
from stageline_gateway.openai_api.dialects.responses_request import RESPONSES_KNOWN, ResponsesRequest
from stageline_gateway.openai_api.known_fields import CHAT_KNOWN, COMPLETION_KNOWN, VLLM_KNOWN, Fate, Known
from stageline_gateway.openai_api.request_types import ChatRequest, CompletionRequest
from stageline_gateway.settings import GatewaySettings

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "strict": True}}


def user(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"} | fields]}


IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"run": "1"}, "store": True}, "metadata,store"),
    (
        {"verbosity": "low", "service_tier": "flex"},
        "verbosity,service_tier",
    ),
    ({"priority": 3, "request_id": "mine"}, "priority,request_id"),
    ({"user": "bo", "safety_identifier": "b", "prompt_cache_key": "k"}, "user,safety_identifier,prompt_cache_key"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": {}}}},
        "response_format.json_schema.description",
    ),
    (user(name="Bo Derek"), "messages.name"),
    (
        user(content=[{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]),
        "messages.content.cache_control",
    ),
    ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls,tools.function.strict"),
    (
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
]


@pytest.fixture
def strict_gateway(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    settings = GatewaySettings(tmp_path / "endpoints.json", strict_fields=True)
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        yield gateway


@pytest.mark.parametrize(("extra", "named"), IGNORED, ids=lambda value: ascii(value)[:40])
def test_what_changes_nothing_is_named_in_a_header(
    gateway: RunningGateway, engine: ScriptedEngine, extra: dict[str, Any], named: str
) -> None:
    answered = gateway.http.post("/v1/chat/completions", json=CHAT | extra)
    assert answered.status_code == 200, answered.text
    assert answered.headers["x-stageline-ignored"] == named
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(message.content, message.name) for message in prompt.messages] == [("Hi", None)]


def test_a_strict_gateway_refuses_each_of_them(strict_gateway: RunningGateway, engine: ScriptedEngine) -> None:
    for extra, named in IGNORED:
        answered = strict_gateway.http.post("/v1/chat/completions", json=CHAT | extra)
        last = named.split(",")[0].rsplit(".")[-1]
        assert (answered.status_code, last in answered.json()["error"]["param"]) == (400, True), (extra, answered.text)
    assert engine.requests == []


RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Hi"}
MESSAGE: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA: dict[str, Any] = {"type": "json_schema", "name": "n", "schema": {}}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f"}
CUSTOM: dict[str, Any] = {"name": "f", "input_schema": {}}
WITHOUT_EFFECT: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", RESPONSE | {"text": {"verbosity": "low"}}, "text.verbosity"),
    ("/v1/responses", RESPONSE | {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ("/v1/responses", RESPONSE | {"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
    ("/v1/responses", RESPONSE | {"user": "bo"}, "user"),
    ("/v1/responses", RESPONSE | {"text": {"format": SCHEMA | {"description": "d"}}}, "text.format.description"),
    ("/v1/responses", RESPONSE | {"input": [{"role": "user", "content": "Hi", "phase": "commentary"}]}, "input.phase"),
    ("/v1/responses", RESPONSE | {"tools": [FUNCTION | {"strict": True}]}, "tools.strict"),
    ("/v1/responses", RESPONSE | {"tools": [FUNCTION | {"defer_loading": True}]}, "tools.defer_loading"),
    ("/v1/messages", MESSAGE | {"tools": [CUSTOM | {"defer_loading": True}]}, "tools.defer_loading"),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ("/v1/messages", MESSAGE | {"tools": [CUSTOM | {"strict": True}]}, "tools.strict"),
    (
        "/v1/messages",
        MESSAGE | {"tools": [CUSTOM], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "tool_choice.disable_parallel_tool_use",
    ),
]


@pytest.mark.parametrize(("path", "body", "named"), WITHOUT_EFFECT, ids=lambda value: ascii(value)[:40])
def test_parts_without_effect_are_named_too(
    gateway: RunningGateway, path: str, body: dict[str, Any], named: str
) -> None:
    answered = gateway.http.post(path, json=body)
    assert answered.status_code == 200, answered.text
    assert answered.headers["x-stageline-ignored"] == named


def test_a_strict_gateway_refuses_parts_without_effect(strict_gateway: RunningGateway, engine: ScriptedEngine) -> None:
    for path, body, named in WITHOUT_EFFECT:
        answered = strict_gateway.http.post(path, json=body)
        assert answered.status_code == 400, (named, answered.text)
        assert named.rpartition(".")[2] in answered.json()["error"]["message"]
    assert engine.requests == []


def test_a_strict_gateway_takes_its_own_items_back(strict_gateway: RunningGateway, engine: ScriptedEngine) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    text = '<think>Hm.</think>So: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    end = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=1)
    begin = Admitted(prompt_tokens=3, tool_call_format=ToolCallFormat.TAGGED, thoughts=ThoughtStart.TAGGED)
    engine.script = lambda _: [Say(begin), Say(Delta(text=text, token_ids=(1,))), Say(end)]
    body = RESPONSE | {"input": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    items = strict_gateway.http.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "wet"}
    again = strict_gateway.http.post("/v1/responses", json=body | {"input": [*body["input"], *items, result]})
    assert again.status_code == 200, again.text


def test_a_request_without_such_fields_gets_no_such_header(gateway: RunningGateway) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": CHAT | {"store": False},
        "/v1/completions": TEXT | {"metadata": {}},
    }
    for path, body in bodies.items():
        assert "x-stageline-ignored" not in gateway.http.post(path, json=body).headers


def test_completions_ignore_them_too(gateway: RunningGateway) -> None:
    answered = gateway.http.post("/v1/completions", json=TEXT | {"store": True, "vllm_xargs": {"a": 1}})
    assert (answered.status_code, answered.headers["x-stageline-ignored"]) == (200, "store,vllm_xargs")


def test_the_document_of_each_gateway_says_what_it_takes(
    gateway: RunningGateway, strict_gateway: RunningGateway
) -> None:
    lenient, strict = (
        one.http.get("/openapi.json").json()["components"]["schemas"] for one in (gateway, strict_gateway)
    )
    assert lenient["ChatRequest"]["properties"]["store"] == {}
    assert strict["ChatRequest"]["properties"]["store"] == {"enum": [False, None]}
    assert lenient["Message"]["properties"]["cache_control"] == {}
    assert "cache_control" not in strict["Message"]["properties"]


def test_no_field_is_both_supported_and_in_the_table() -> None:
    tables: list[tuple[Mapping[str, Known], type[Struct]]] = [
        (CHAT_KNOWN, ChatRequest),
        (COMPLETION_KNOWN, CompletionRequest),
        (RESPONSES_KNOWN, ResponsesRequest),
        (MESSAGES_KNOWN, MessagesRequest),
    ]
    for known, model in tables:
        assert known.keys().isdisjoint(model.__struct_fields__), known.keys() & set(model.__struct_fields__)


TABLES: dict[str, tuple[Mapping[str, Known], dict[str, Any]]] = {
    "/v1/chat/completions": (CHAT_KNOWN, CHAT),
    "/v1/completions": (COMPLETION_KNOWN, TEXT),
    "/v1/responses": (RESPONSES_KNOWN, RESPONSE),
    "/v1/messages": (MESSAGES_KNOWN, MESSAGE),
}


@pytest.mark.parametrize("path", TABLES)
def test_every_field_of_the_table_meets_its_fate(gateway: RunningGateway, path: str) -> None:
    table, body = TABLES[path]
    for name, known in table.items():
        answered = gateway.http.post(path, json=body | {name: "something"})
        if known.fate is Fate.IGNORED:
            assert (answered.status_code, answered.headers["x-stageline-ignored"]) == (200, name)
        else:
            assert (answered.status_code, f"'{name}'" in answered.json()["error"]["message"]) == (400, True), name


def test_fields_of_vllms_clients_are_known_on_every_path() -> None:
    for table, _ in TABLES.values():
        assert table.keys() >= VLLM_KNOWN.keys()
