"""`/tokenize` takes a chat's body or a completion's: the same prompt, and the same rule for what is ignored."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_api.engine_http import ChatPrompt, TextPrompt
from stageline_gateway.openai_api.known_fields import CHAT_KNOWN, COMPLETION_KNOWN, Fate, Known
from stageline_gateway.settings import GatewaySettings

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
IDS: dict[str, Any] = {"model": MODEL, "tokens": [5]}
FUNCTION: dict[str, Any] = {"name": "place", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "place", "arguments": '{"a": 1}'}}
CALLS: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "name": "place", "content": "wet"}
PARTS: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
HEADER = "x-stageline-ignored"


@pytest.fixture(autouse=True)
def tokenizing(engine: ScriptedEngine) -> None:
    engine.replies |= {
        "POST /v1/tokenize": (200, '{"token_ids": [5, 6], "max_model_len": 99}'),
        "POST /v1/detokenize": (200, '{"text": "ab"}'),
    }


@pytest.fixture
def strict_gateway(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningGateway]:
    with running_gateway(GatewaySettings(tmp_path / "endpoints.json", strict_fields=True)) as gateway:
        gateway.serve(group(engine.url))
        yield gateway


def with_messages(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return CHAT | {"messages": [*messages]} | fields


SAME: dict[str, dict[str, Any]] = {
    "system, parts and a call with its result": with_messages(
        {"role": "developer", "content": "Be brief."}, PARTS, CALLS, RESULT, tools=[TOOL]
    ),
    "a cut call": with_messages(
        USER, CALLS | {"tool_calls": [CALL | {"function": {"name": "place", "arguments": '{"a'}}]}, RESULT
    ),
    "tools that must be called": with_messages(USER, tools=[TOOL], tool_choice="required"),
    "tools that may not be called": with_messages(USER, tools=[TOOL], tool_choice="none"),
    "a named tool": with_messages(
        USER, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "place"}}
    ),
    "arguments of the template": with_messages(
        USER, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low"
    ),
    "words to go on with": with_messages(USER, {"role": "assistant", "content": "So"}, continue_final_message=True),
    "no beginning of an answer": with_messages(USER, add_generation_prompt=False),
    "an answer sent back": with_messages(
        USER, {"role": "assistant", "content": "x", "refusal": None, "annotations": None, "tool_calls": []}, USER
    ),
}  # fmt: skip


@pytest.mark.parametrize("body", SAME.values(), ids=SAME)
def test_the_prompt_is_that_of_a_chat_of_the_same_body(
    gateway: RunningGateway, engine: ScriptedEngine, body: dict[str, Any]
) -> None:
    answered = gateway.http.post("/tokenize", json=body)
    assert (answered.status_code, HEADER in answered.headers) == (200, False), answered.text
    assert gateway.http.post("/v1/chat/completions", json=body).status_code == 200
    asked = msgspec.convert(json.loads(engine.asked[0][1])["prompt"], ChatPrompt)
    chat = engine.requests[-1].prompt
    assert isinstance(chat, ChatPrompt)
    assert asked == structs.replace(chat, tools_guided=True), "in which form calls are written doesn't matter"


NOTHING: dict[str, Any] = {
    "temperature": None,
    "n": 1,
    "stream": False,
    "stop": [],
    "store": False,
    "top_logprobs": None,
}
SENT: list[tuple[dict[str, Any], str]] = [
    (CHAT | NOTHING, ""),
    (TEXT | {"temperature": None, "n": 1, "stream": False, "echo": False}, ""),
    (CHAT | {"metadata": {"run": "1"}, "store": True}, "metadata,store"),
    (with_messages(USER | {"name": "Bo"}), "messages.name"),
    (with_messages(CALLS | {"tool_calls": [CALL | {"index": 0}]}, RESULT), "messages.tool_calls.index"),
    (
        with_messages({"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}),
        "messages.content.cache_control",
    ),
    (
        CHAT | {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]},
        "tools.function.strict",
    ),
    (CHAT | {"stream": True, "temperature": 0.5, "max_tokens": 9}, "stream,temperature,max_tokens"),
    (CHAT | {"response_format": {"type": "json_object"}, "seed": 3}, "response_format,seed"),
    (CHAT | {"guided_choice": ["a"], "logprobs": True, "top_logprobs": 2}, "guided_choice,logprobs,top_logprobs"),
    (TEXT | {"max_tokens": 0, "echo": True, "user": "bo"}, "user,max_tokens,echo"),
    (TEXT | {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "named"), SENT, ids=lambda value: ascii(value)[-40:])
def test_what_makes_no_prompt_is_named_in_a_header(
    gateway: RunningGateway, engine: ScriptedEngine, body: dict[str, Any], named: str
) -> None:
    answered = gateway.http.post("/tokenize", json=body)
    assert (answered.status_code, answered.headers.get(HEADER, "")) == (200, named), answered.text
    kind = ChatPrompt if "messages" in body else TextPrompt
    assert msgspec.convert(json.loads(engine.asked[0][1])["prompt"], kind)


def test_a_strict_gateway_refuses_what_makes_no_prompt(strict_gateway: RunningGateway) -> None:
    for body, named in SENT:
        answered = strict_gateway.http.post("/tokenize", json=body)
        assert answered.status_code == (400 if named else 200), (body, answered.text)
        assert not named or any(name.split(".")[-1] in answered.json()["error"]["param"] for name in named.split(","))
    for body in SAME.values():
        asked, chat = (strict_gateway.http.post(path, json=body) for path in ("/tokenize", "/v1/chat/completions"))
        assert asked.status_code == chat.status_code, asked.text


TABLES: dict[str, tuple[str, Mapping[str, Known], dict[str, Any]]] = {
    "a chat": ("/tokenize", CHAT_KNOWN, CHAT),
    "a completion": ("/tokenize", COMPLETION_KNOWN, TEXT),
    "ids": ("/detokenize", COMPLETION_KNOWN, IDS),
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_field_of_the_table_meets_its_fate(gateway: RunningGateway, kind: str) -> None:
    path, table, body = TABLES[kind]
    for name, known in table.items():
        answered = gateway.http.post(path, json=body | {name: "something"})
        if known.fate is Fate.IGNORED:
            assert (answered.status_code, answered.headers[HEADER]) == (200, name)
        else:
            assert (answered.status_code, f"'{name}'" in answered.json()["error"]["message"]) == (400, True), name


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", CHAT | {"temprature": 0.5}, "temprature"),
        ("/tokenize", CHAT | {"temperature": 5}, "temperature"),
        ("/tokenize", with_messages(USER | {"nmae": "Bo"}), "messages[0].nmae"),
        ("/tokenize", with_messages({"role": "tool", "content": "x"}), "messages[0].tool_call_id"),
        ("/tokenize", CHAT | {"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ("/tokenize", CHAT | {"tool_choice": "required"}, "tool_choice"),
        ("/tokenize", CHAT | {"chat_template": "x"}, "chat_template"),
        ("/tokenize", CHAT | {"return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", CHAT | {"add_special_tokens": "x"}, "add_special_tokens"),
        ("/tokenize", TEXT | {"tools": [TOOL]}, "tools"),
        ("/tokenize", TEXT | {"prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", TEXT | {"prompt": 7}, "prompt"),
        ("/tokenize", TEXT | {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/detokenize", IDS | {"temprature": 0.5}, "temprature"),
    ],
    ids=lambda value: ascii(value)[-40:],
)
def test_what_is_wrong_is_refused_by_name(gateway: RunningGateway, path: str, body: dict[str, Any], param: str) -> None:
    answered = gateway.http.post(path, json=body)
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, param), answered.text


def test_null_asks_for_nothing(gateway: RunningGateway) -> None:
    for body in (CHAT | {"prompt": None}, TEXT | {"messages": None}, CHAT | {"return_token_strs": None}):
        assert gateway.http.post("/tokenize", json=body).status_code == 200


def test_the_document_of_each_gateway_says_what_it_takes(
    gateway: RunningGateway, strict_gateway: RunningGateway
) -> None:
    lenient, strict = (
        one.http.get("/openapi.json").json()["components"]["schemas"] for one in (gateway, strict_gateway)
    )
    for name in ("TokenizeChat", "TokenizeCompletion"):
        assert "return_token_strs" in lenient[name]["properties"]
        assert lenient[name]["properties"]["store"] == {}
        assert strict[name]["properties"]["store"] == {"enum": [False, None]}
        assert strict[name]["properties"]["stream"] == {"enum": [False, None]}
        assert (
            lenient[name]["properties"]["temperature"] != strict[name]["properties"]["temperature"] == {"enum": [None]}
        )
