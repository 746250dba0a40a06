"""Thoughts, and null beside calls, that a client sends back reach the engine, by each of the three APIs."""

from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import Say, ScriptedEngine
from stageline_api.engine_http import Admitted, ChatPrompt, Delta, Finished, FinishReason
from stageline_gateway.openai_api.dialects.prepared import prepare_response

FINISHED = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=1)
CALL = {"id": "c12345678", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c12345678", "content": "4"},
    ]
}
OPENROUTER = {"messages": [*CHAT["messages"][:1], {"role": "assistant", "content": "4", "reasoning": "Hm."}]}
MESSAGES: dict[str, Any] = {
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c12345678", "name": "add", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c12345678", "content": "4"}]},
    ],
}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": "2+2?"},
        REASONING,
        {"type": "function_call", "call_id": "c12345678", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c12345678", "output": "4"},
    ]
}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
EMPTY: Any = [{"type": "text", "text": ""}]


def chat_with(content: Any) -> dict[str, Any]:
    return {"messages": [CHAT["messages"][0], CHAT["messages"][1] | {"content": content}, CHAT["messages"][2]]}


def message_with(content: Any) -> dict[str, Any]:
    user, said, result = MESSAGES["messages"]
    return {"max_tokens": 9, "messages": [user, said | {"content": [*content, *said["content"]]}, result]}


def response_with(content: Any) -> dict[str, Any]:
    user, reasoning, *calls = RESPONSES["input"]
    return {"input": [user, reasoning, {"type": "message", "role": "assistant", "content": content}, *calls]}


SAID = {"type": "message", "role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("path", "body", "is_null"),
    [
        ("/v1/chat/completions", CHAT, True),
        ("/v1/chat/completions", OPENROUTER, False),
        ("/v1/chat/completions", chat_with(""), True),
        ("/v1/chat/completions", chat_with(EMPTY), True),
        ("/v1/chat/completions", chat_with("So:"), False),
        ("/v1/messages", MESSAGES, True),
        ("/v1/messages", message_with(EMPTY), True),
        ("/v1/messages", message_with([{"type": "text", "text": "So:"}]), False),
        ("/v1/responses", response_with(""), True),
        ("/v1/responses", response_with("So:"), False),
        ("/v1/responses", RESPONSES, True),
        ("/v1/responses", {"input": [RESPONSES["input"][0], SUMMARY, SAID]}, False),
    ],
)
def test_thoughts_of_an_earlier_turn_reach_the_engine(
    gateway: RunningGateway, engine: ScriptedEngine, path: str, body: dict[str, Any], is_null: bool
) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=3)), Say(Delta(text="4", token_ids=(1,))), Say(FINISHED)]
    answered = gateway.http.post(path, json={"model": MODEL} | body)
    assert answered.status_code == 200, answered.text
    assert "x-stageline-ignored" not in answered.headers
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    told = [(message.role, message.reasoning, message.is_content_null) for message in prompt.messages]
    assert told[:2] == [("user", None, False), ("assistant", "Hm.", is_null)]
    assert {reasoning for _, reasoning, _ in told[2:]} <= {None}


def reasoning(*texts: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in texts]}


USER, CALL_ITEM, RESULT = RESPONSES["input"][0], RESPONSES["input"][2], RESPONSES["input"][3]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([reasoning("1"), SAID, reasoning("2"), CALL_ITEM, RESULT], ["1\n2", None]),
        ([reasoning("1"), reasoning("2"), SAID], ["1\n2"]),
        ([reasoning("1", "2"), reasoning(), reasoning(""), reasoning("3"), CALL_ITEM], ["1\n2\n3"]),
        ([reasoning("1"), CALL_ITEM, reasoning("2"), CALL_ITEM | {"call_id": "c2"}, RESULT], ["1\n2", None]),
        ([reasoning("1"), SAID, reasoning("2"), SAID], ["1", "2"]),
        ([reasoning("1"), CALL_ITEM, RESULT, reasoning("2"), SAID], ["1", None, "2"]),
        ([reasoning(""), SAID], [None]),
    ],
)
def test_all_reasoning_items_of_a_turn_are_joined_in_order(
    items: list[dict[str, Any]], expected: list[str | None]
) -> None:
    prepared = prepare_response({"model": MODEL, "input": [USER, *items]}, False)
    prompt = prepared.generate.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [message.reasoning for message in prompt.messages] == [None, *expected]


@pytest.mark.parametrize(
    ("role", "thoughts"), [("assistant", [{"text": "Hm."}]), ("user", "Hm.")], ids=["no text", "of a user"]
)
def test_what_is_no_thought_of_the_assistants_is_named_as_ignored(
    gateway: RunningGateway, engine: ScriptedEngine, role: str, thoughts: Any
) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=3)), Say(FINISHED)]
    turns = [{"role": role, "content": "4", "reasoning_content": thoughts}, {"role": "user", "content": "So?"}]
    answered = gateway.http.post("/v1/chat/completions", json={"model": MODEL, "messages": turns})
    assert answered.headers["x-stageline-ignored"] == "messages.reasoning_content"
