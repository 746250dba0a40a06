"""`tool_choice` of type `allowed_tools`: the model is offered these functions of all that the client declares."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, ChatPrompt, Delta, Finished, FinishReason, ToolCallFormat
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.dialects.prepared import prepare_response
from stageline_gateway.openai_api.translate import Prepare, Prepared, prepare_chat

NAMES = ("weather", "time", "rates")


def function(name: str, api: str) -> dict[str, Any]:
    named = {"name": name}
    return {"type": "function"} | ({"function": named} if api == "chat" else named)


def choice(api: str, mode: str, *tools: Any) -> dict[str, Any]:
    allowed = {"mode": mode, "tools": [function(one, api) if isinstance(one, str) else one for one in tools]}
    return {"type": "allowed_tools"} | ({"allowed_tools": allowed} if api == "chat" else allowed)


def body(api: str, chosen: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]} if api == "chat" else {"input": "?"}
    return asked | {"model": MODEL, "tools": [function(name, api) for name in NAMES], "tool_choice": chosen}


PREPARE: dict[str, Prepare] = {"chat": prepare_chat, "responses": prepare_response}
both_apis = pytest.mark.parametrize("api", PREPARE)


def offered(prepared: Prepared) -> list[str]:
    prompt = prepared.generate.prompt
    assert isinstance(prompt, ChatPrompt)
    return [tool.name for tool in prompt.tools]


@both_apis
def test_only_the_allowed_tools_are_offered(api: str) -> None:
    prepared = PREPARE[api](body(api, choice(api, "auto", "rates", "time")), True)
    assert offered(prepared) == ["time", "rates"]
    assert prepared.generate.sampling.json_schema is None


@both_apis
def test_a_required_call_is_one_of_the_allowed_tools(api: str) -> None:
    prepared = PREPARE[api](body(api, choice(api, "required", "time")), True)
    schema = json.loads(prepared.generate.sampling.json_schema or "")
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["time"]
    assert offered(prepared) == ["time"]


@pytest.mark.parametrize(
    ("api", "chosen", "param"),
    [
        ("chat", choice("chat", "auto", "time", "absent"), "tool_choice.allowed_tools.tools[1].function.name"),
        ("responses", choice("responses", "auto", "time", "absent"), "tool_choice.tools[1].name"),
        (
            "responses",
            choice("responses", "auto", {"type": "web_search"}, "time", "absent"),
            "tool_choice.tools[2].name",
        ),
        ("chat", choice("chat", "none", "time"), "tool_choice.allowed_tools.mode"),
        ("responses", choice("responses", "any", "time"), "tool_choice.mode"),
        ("chat", choice("chat", "required"), "tool_choice"),
        ("responses", choice("responses", "required"), "tool_choice"),
        ("chat", choice("chat", "auto", {"type": "function"}), "tool_choice.allowed_tools.tools[0].function"),
        ("chat", {"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.mode"),
        ("responses", {"type": "allowed_tools", "tools": [function("time", "responses")]}, "tool_choice.mode"),
        ("responses", choice("responses", "auto", {"type": "namespace", "name": "crm"}), "tool_choice.tools[0].type"),
    ],
)
def test_what_can_not_be_allowed_is_named(api: str, chosen: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        PREPARE[api](body(api, chosen), False)
    assert (refused.value.param, param in refused.value.message) == (param, True), refused.value.message


@both_apis
def test_allowed_tools_of_other_servers_are_left_out_and_named(api: str) -> None:
    place = "tool_choice.allowed_tools.tools" if api == "chat" else "tool_choice.tools"
    search = {"type": "web_search"}
    prepared = PREPARE[api](body(api, choice(api, "auto", search, "time")), False)
    assert (offered(prepared), prepared.ignored) == (["time"], (f"{place}[web_search]",))
    assert offered(PREPARE[api](body(api, choice(api, "auto", search)), False)) == []
    for mode, strict in (("required", False), ("auto", True)):
        with pytest.raises(ApiError) as refused:
            PREPARE[api](body(api, choice(api, mode, search)), strict)
        assert (refused.value.param or "").startswith("tool_choice")


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def _calls(name: str) -> list[Step]:
    text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    end = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=1)
    return [
        Say(Admitted(prompt_tokens=3, tool_call_format=ToolCallFormat.TAGGED)),
        Say(Delta(text=text, token_ids=(1,))),
        Say(end),
    ]


def test_a_call_of_a_tool_that_is_not_allowed_is_text(client: OpenAI, engine: ScriptedEngine) -> None:
    asked: Any = body("chat", choice("chat", "auto", "time"))
    engine.script = lambda _: _calls("time")
    assert client.chat.completions.create(**asked).choices[0].message.tool_calls
    engine.script = lambda _: _calls("rates")
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.tool_calls, '"rates"' in (message.content or "")) == (None, True), message


def test_a_response_repeats_what_was_allowed(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: _calls("time")
    asked: Any = body("responses", choice("responses", "auto", "time"))
    answered: Any = client.responses.create(**asked)
    assert answered.tool_choice.model_dump() == asked["tool_choice"]
    assert [one.name for one in answered.output if one.type == "function_call"] == ["time"]
