"""Functions in `namespace` tools of `/v1/responses`: offered under both names, and told apart in calls."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, ChatPrompt, Delta, Finished, FinishReason, ToolCallFormat
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.dialects.prepared import prepare_response

ORDERS: dict[str, Any] = {"type": "function", "name": "orders", "parameters": {"type": "object"}}
SHELL: dict[str, Any] = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
CRM: dict[str, Any] = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [ORDERS]}
MCP: dict[str, Any] = {"type": "namespace", "name": "mcp__files__", "tools": [ORDERS | {"defer_loading": True}]}
NAMED_DESCRIPTION = "tools[namespace].description"


def body(*tools: Any, **extra: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Any orders?", "tools": list(tools)} | extra


def prompt_of(fields: dict[str, Any]) -> ChatPrompt:
    prompt = prepare_response(fields, False).generate.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_functions_of_namespaces_are_offered_beside_the_others() -> None:
    prepared = prepare_response(body(CRM, SHELL, MCP), False)
    assert isinstance(prepared.generate.prompt, ChatPrompt)
    assert [tool.name for tool in prepared.generate.prompt.tools] == ["crm__orders", "shell", "mcp__files__orders"]
    assert set(prepared.ignored) == {NAMED_DESCRIPTION, "tools.defer_loading"}


def test_tools_in_a_namespace_that_can_not_be_called_are_left_out_and_named() -> None:
    custom = {"type": "custom", "name": "sql", "format": {"type": "text"}}
    prepared = prepare_response(body({"type": "namespace", "name": "crm", "tools": [custom, ORDERS]}), False)
    assert isinstance(prepared.generate.prompt, ChatPrompt)
    assert [tool.name for tool in prepared.generate.prompt.tools] == ["crm__orders"]
    assert prepared.ignored == ("tools[custom]",)


def test_a_call_of_an_earlier_turn_has_the_name_that_is_offered() -> None:
    call = {"type": "function_call", "call_id": "c", "namespace": "crm", "name": "orders", "arguments": "{}"}
    told = {"type": "function_call_output", "call_id": "c", "output": "none", "name": "orders", "namespace": "crm"}
    asked = body(CRM, input=[{"role": "user", "content": "?"}, call, told])
    assert [one.name for one in prompt_of(asked).messages[1].tool_calls] == ["crm__orders"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([SHELL, CRM | {"tools": [ORDERS, ORDERS]}], "tools[1].tools[1].name"),
        ([CRM, ORDERS | {"name": "crm__orders"}], "tools[1].name"),
        ([CRM | {"tools": [ORDERS | {"name": "x" * 128}]}], "tools[0].tools[0].name"),
        ([CRM | {"tools": [ORDERS | {"parameters": 1}]}], "tools[0].tools[0].parameters"),
        ([CRM | {"tools": [ORDERS | {"type": "fucntion"}]}], "tools[0].tools[0].type"),
        ([CRM | {"name": "no name"}], "tools[0].name"),
        ([{"type": "namespace", "name": "crm"}], "tools[0].tools"),
        (
            [CRM | {"name": f"n{n}", "tools": [ORDERS | {"name": f"f{k}"} for k in range(50)]} for n in range(3)],
            "tools",
        ),
    ],
)
def test_what_is_wrong_in_a_namespace_is_named_at_its_place(tools: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        prepare_response(body(*tools), False)
    assert (refused.value.param, param in refused.value.message) == (param, True), refused.value.message


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def _calls_orders(_: Any) -> list[Step]:
    text = '<tool_call>{"name": "crm__orders", "arguments": {"of": "Bo"}}</tool_call>'
    pieces = [Say(Delta(text=text[at : at + 9], token_ids=(at,))) for at in range(0, len(text), 9)]
    end = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=len(pieces))
    return [Say(Admitted(prompt_tokens=3, tool_call_format=ToolCallFormat.TAGGED)), *pieces, Say(end)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_told_with_its_namespace_and_can_be_sent_back(
    client: OpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = _calls_orders
    asked: Any = body(SHELL, CRM)
    if stream:
        events = list(client.responses.create(**asked, stream=True))
        answered: Any = events[-1].response
        done: Any = next(one for one in events if one.type == "response.function_call_arguments.done")
        assert (done.name, done.arguments) == ("orders", '{"of": "Bo"}')
        added: Any = next(one for one in events if one.type == "response.output_item.added")
        assert (added.item.namespace, added.item.name) == ("crm", "orders")
    else:
        answered = client.responses.create(**asked)
    (call,) = answered.output
    assert (call.type, call.namespace, call.name, call.arguments) == ("function_call", "crm", "orders", '{"of": "Bo"}')
    assert [tool.name for tool in answered.tools] == ["shell", "crm"]
    assert [tool.name for tool in answered.tools[1].tools] == ["orders"]
    turn = [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "none"}]
    client.responses.create(model=MODEL, input=[{"role": "user", "content": "?"}, *turn], tools=asked["tools"])
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [one.name for one in prompt.messages[1].tool_calls] == ["crm__orders"]


@pytest.mark.parametrize("chosen", [{"name": "crm__orders"}, {"name": "orders", "namespace": "crm"}], ids=str)
def test_a_function_of_a_namespace_can_be_chosen(
    chosen: dict[str, str], client: OpenAI, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: [
        Say(Admitted(prompt_tokens=3)),
        Say(Delta(text="{}", token_ids=(1,))),
        Say(Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=1)),
    ]
    asked: Any = body(SHELL, CRM, tool_choice={"type": "function"} | chosen)
    (call,) = client.responses.create(**asked).output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("crm", "orders")
