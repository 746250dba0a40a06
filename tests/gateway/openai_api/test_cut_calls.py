"""A call that the token limit cut off is the same whole and streamed, in every API, and its markup is never text."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason, ToolCallFormat

TAGGED = 'So: <tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}\n</tool_call> Wet.'
LISTED = '[{"name":"weather","arguments":{"place":"Oslo"}},{"name":"time","arguments":{"zone":"CET"}}]'
ANSWERS: dict[str, tuple[str, ToolCallFormat | None]] = {
    "auto": (TAGGED, ToolCallFormat.TAGGED),
    "required": (LISTED, None),
    "named": ('{"place": "Oslo", "days": 3}', None),
}
SCHEMA = {"type": "object"}
NAMES = ("weather", "time")
TURN = {"role": "user", "content": "Rain?"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [TURN],
        "tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
    },
    "/v1/responses": {
        "input": [TURN],
        "tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
    },
    "/v1/messages": {
        "messages": [TURN],
        "max_tokens": 99,
        "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
    },
}
CHOICES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"required": "required", "named": {"type": "function", "function": {"name": "weather"}}},
    "/v1/responses": {"required": "required", "named": {"type": "function", "name": "weather"}},
    "/v1/messages": {"required": {"type": "any"}, "named": {"type": "tool", "name": "weather"}},
}
Part = tuple[str, str]
"""The name of a call, empty for words, and its arguments or the words."""


def says(text: str, form: ToolCallFormat | None, reason: FinishReason = FinishReason.LENGTH) -> list[Step]:
    pieces = [Say(Delta(text=text[at : at + 5], token_ids=(at,))) for at in range(0, len(text), 5)]
    end = Finished(reason=reason, prompt_tokens=3, completion_tokens=len(pieces))
    return [Say(Admitted(prompt_tokens=3, tool_call_format=form)), *pieces, Say(end)]


def body_of(path: str, kind: str) -> dict[str, Any]:
    chosen = CHOICES[path].get(kind)
    return BODIES[path] | {"model": MODEL} | ({} if chosen is None else {"tool_choice": chosen})


def events_of(gateway: RunningGateway, path: str, kind: str) -> list[dict[str, Any]]:
    answered = gateway.http.post(path, json=body_of(path, kind) | {"stream": True})
    lines = (line.removeprefix("data: ") for line in answered.text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def told_by(event: dict[str, Any]) -> Iterable[tuple[bool, str, str]]:
    """What an event of any of the APIs adds: whether something begins with it, of which name, and the text."""
    match event:
        case {"choices": [{"delta": delta}]}:
            if delta.get("content"):
                yield False, "", delta["content"]
            for call in delta.get("tool_calls", ()):
                yield "id" in call, call["function"].get("name", ""), call["function"]["arguments"]
        case {"type": "response.output_item.added", "item": begun} | {"content_block": begun}:
            yield True, begun.get("name", ""), ""
        case {"type": "response.output_text.delta" | "response.function_call_arguments.delta", "delta": text}:
            yield False, "", text
        case {"type": "content_block_delta", "delta": delta}:
            yield False, "", delta.get("text") or delta.get("partial_json", "")
        case _:
            return


def streamed_parts(events: list[dict[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    for event in events:
        for begins, name, text in told_by(event):
            is_words_after_call = "choices" in event and event["choices"][0]["delta"].get("content") == text
            if begins or not parts or (is_words_after_call and parts[-1][0]):
                parts.append((name, text))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + text)
    return parts


def whole_parts(path: str, answer: dict[str, Any]) -> list[Part]:
    match path:
        case "/v1/messages":
            return [(one.get("name", ""), one.get("text") or json.dumps(one["input"])) for one in answer["content"]]
        case "/v1/responses":
            items = answer["output"]
            return [
                (one["name"], one["arguments"]) if "name" in one else ("", one["content"][0]["text"]) for one in items
            ]
        case _:
            message = answer["choices"][0]["message"]
            calls = [one["function"] for one in message.get("tool_calls", ())]
            words = [("", message["content"])] if message["content"] else []
            return words + [(one["name"], one["arguments"]) for one in calls]


def ended_by(path: str, answer: dict[str, Any]) -> Any:
    match path:
        case "/v1/messages":
            return answer["stop_reason"]
        case "/v1/responses":
            return answer["incomplete_details"]["reason"]
        case _:
            return answer["choices"][0]["finish_reason"]


def as_message(parts: list[Part]) -> list[Part]:
    """Parts as a whole message has them: a call's input is an object, which the arguments of one cut off are not."""
    *before, (name, text) = parts or [("", "")]
    last = [(name, text)] if not name or (text.endswith("}") and text.count("{") == text.count("}")) else []
    return [(name, json.dumps(json.loads(text)) if name else text) for name, text in before + last if text]


ENDS = {"/v1/chat/completions": "length", "/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("path", BODIES)
def test_a_cut_anywhere_is_the_same_whole_and_streamed(
    gateway: RunningGateway, engine: ScriptedEngine, path: str, kind: str
) -> None:
    text, form = ANSWERS[kind]
    for cut in range(1, text.find(" Wet") if kind == "auto" else len(text), 2):
        engine.script = lambda _, written=text[:cut]: says(written, form)  # type: ignore[misc]
        streamed = [part for part in streamed_parts(events_of(gateway, path, kind)) if any(part)]
        whole = gateway.http.post(path, json=body_of(path, kind)).json()
        assert whole_parts(path, whole) == (as_message(streamed) if path == "/v1/messages" else streamed), text[:cut]
        assert ended_by(path, whole) == ENDS[path]
        words = [words for name, words in (*streamed, *whole_parts(path, whole)) if not name]
        assert set(words) <= {"S", "So:", "So: ", "So: <", "So: <to"}, text[:cut]


CUTS = [
    ("auto", "So: <tool", [("", "So: ")]),
    ("auto", "So: <tool_call>", [("", "So: ")]),
    ("auto", 'So: <tool_call>\n{"name": "wea', [("", "So: ")]),
    ("auto", 'So: <tool_call>\n{"name": "weather", "arg', [("", "So: "), ("weather", "")]),
    ("auto", 'So: <tool_call>\n{"name": "weather", "arguments": {"pl', [("", "So: "), ("weather", '{"pl')]),
    ("required", "[", []),
    ("required", '[{"name":"weather","arguments":{"place":', [("weather", '{"place":')]),
    ("named", '{"place": "Os', [("weather", '{"place": "Os')]),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("kind", "text", "expected"), CUTS, ids=lambda value: ascii(value)[:60])
def test_a_chat_has_what_the_model_wrote_of_a_call(
    gateway: RunningGateway, engine: ScriptedEngine, kind: str, text: str, expected: list[Part], stream: bool
) -> None:
    engine.script = lambda _: says(text, ANSWERS[kind][1])
    path = "/v1/chat/completions"
    if stream:
        assert streamed_parts(events_of(gateway, path, kind)) == expected
    else:
        assert whole_parts(path, gateway.http.post(path, json=body_of(path, kind)).json()) == expected


def test_a_whole_message_has_calls_before_the_one_cut_off(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: says(LISTED[:-8], None)
    message = gateway.http.post("/v1/messages", json=body_of("/v1/messages", "required")).json()
    assert [(block["type"], block["input"]) for block in message["content"]] == [("tool_use", {"place": "Oslo"})]
    assert message["stop_reason"] == "max_tokens"


def test_what_the_model_itself_wrote_wrong_is_no_call_of_a_whole_message(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    wrong = '<tool_call>{"name": "weather", "arguments": {"place": Oslo}}</tool_call>'
    engine.script = lambda _: says(wrong, ToolCallFormat.TAGGED, FinishReason.STOP)
    message = gateway.http.post("/v1/messages", json=body_of("/v1/messages", "auto")).json()
    assert message["content"] == [{"type": "text", "text": '{"name": "weather", "arguments": {"place": Oslo}'}]
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_only_the_item_that_was_cut_off_is_incomplete(
    gateway: RunningGateway, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = lambda _: says(TAGGED, ToolCallFormat.TAGGED)
    path = "/v1/responses"
    if stream:
        response = events_of(gateway, path, "auto")[-1]["response"]
    else:
        response = gateway.http.post(path, json=body_of(path, "auto")).json()
    found = [(item["type"], item["status"]) for item in response["output"]]
    assert found == [("message", "completed"), ("function_call", "completed"), ("message", "incomplete")]
