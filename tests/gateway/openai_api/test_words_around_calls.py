"""Words before and after a call keep their place in every API's stream, and are those of the whole answer."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason, ToolCallFormat

TEXT = 'So: <tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call> Done. Bye.'
ARGUMENTS = {"type": "object", "properties": {"place": {"type": "string"}}}
TURN = {"role": "user", "content": "Rain?"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [TURN],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}],
    },
    "/v1/responses": {
        "input": [TURN],
        "tools": [{"type": "function", "name": "weather", "parameters": ARGUMENTS}],
    },
    "/v1/messages": {
        "messages": [TURN],
        "max_tokens": 99,
        "tools": [{"name": "weather", "input_schema": ARGUMENTS}],
    },
}
Parts = list[tuple[str, str]]


def says(size: int) -> list[Step]:
    pieces = [Say(Delta(text=TEXT[at : at + size], token_ids=(at,))) for at in range(0, len(TEXT), size)]
    end = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=len(pieces))
    return [Say(Admitted(prompt_tokens=3, tool_call_format=ToolCallFormat.TAGGED)), *pieces, Say(end)]


def joined(pieces: Iterable[tuple[object, str, str]]) -> Parts:
    """Pieces `(part, kind, text)` as parts, a new one wherever the part changes."""
    parts: list[tuple[object, str, str]] = []
    for part, kind, text in pieces:
        if parts and parts[-1][:2] == (part, kind):
            parts[-1] = (part, kind, parts[-1][2] + text)
        else:
            parts.append((part, kind, text))
    return [(kind, text) for _, kind, text in parts]


def pieces_of(path: str, event: dict[str, Any]) -> list[tuple[object, str, str]]:
    """What one event of `path`'s stream adds."""
    if path == "/v1/messages":
        delta = event.get("delta", {})
        kinds = {"text_delta": ("text", "text"), "input_json_delta": ("call", "partial_json")}
        kind, name = kinds.get(delta.get("type"), ("", ""))
        return [(event["index"], kind, delta[name])] if kind else []
    if path == "/v1/responses":
        kind = {"response.output_text.delta": "text", "response.function_call_arguments.delta": "call"}.get(
            event["type"], ""
        )
        return [(event["output_index"], kind, event["delta"])] if kind else []
    delta = event["choices"][0]["delta"]
    words = [(None, "text", delta["content"])] if delta.get("content") else []
    return words + [(None, "call", call["function"]["arguments"]) for call in delta.get("tool_calls", ())]


def whole_of(path: str, answer: dict[str, Any]) -> tuple[str, Any]:
    """All text of an answer given at once, and the arguments of its call."""
    if path == "/v1/messages":
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
        return "".join(texts), next(block["input"] for block in answer["content"] if block["type"] == "tool_use")
    if path == "/v1/responses":
        texts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
        calls = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
        return "".join(texts), json.loads(calls[0])
    message = answer["choices"][0]["message"]
    return message["content"], json.loads(message["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("size", [1, 7, 40, len(TEXT)])
@pytest.mark.parametrize("path", BODIES)
def test_each_piece_lands_where_it_belongs(
    gateway: RunningGateway, engine: ScriptedEngine, path: str, size: int
) -> None:
    engine.script = lambda _: says(size)
    body = BODIES[path] | {"model": MODEL}
    streamed = gateway.http.post(path, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
    parts = joined(piece for line in lines for piece in pieces_of(path, json.loads(line)))
    parts = [(kind, text) for kind, text in parts if text]
    assert parts == [("text", "So: "), ("call", '{"place": "Oslo"}'), ("text", " Done. Bye.")], streamed.text
    whole = gateway.http.post(path, json=body)
    assert whole_of(path, whole.json()) == ("So:  Done. Bye.", {"place": "Oslo"}), whole.text
