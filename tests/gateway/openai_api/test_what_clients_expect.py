"""What clients written for other servers look for beyond an answer's text."""

import json
from importlib.metadata import version
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway, group
from processes.scripted_engine import Pause, Say, ScriptedEngine, Step
from stageline_api.engine_http import Admitted, Delta, Finished, FinishReason, ThoughtStart, ToolCallFormat


def cached(_: Any) -> list[Any]:
    end = Finished(reason=FinishReason.STOP, prompt_tokens=9, completion_tokens=1, cached_tokens=7)
    return [Say(Admitted(prompt_tokens=9)), Say(Delta(text="x", token_ids=(1,))), Say(end)]


@pytest.mark.parametrize("choices", [1, 2])
def test_usage_tells_how_much_of_the_prompt_was_cached(
    gateway: RunningGateway, engine: ScriptedEngine, choices: int
) -> None:
    engine.script = cached
    answered = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": choices}).json()
    assert answered["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": choices,
        "total_tokens": 9 + choices,
        "prompt_tokens_details": {"cached_tokens": 7},
    }


THOUGHT = '<think>Two and two.</think>It is <tool_call>{"name": "add", "arguments": {}}</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


def thinks(text: str, pause_seconds: float = 0.0) -> list[Step]:
    begin = Admitted(prompt_tokens=3, thoughts=ThoughtStart.TAGGED, tool_call_format=ToolCallFormat.TAGGED)
    pieces = [Delta(text=text[at : at + 5], token_ids=(at, at)) for at in range(0, len(text), 5)]
    end = Finished(reason=FinishReason.STOP, prompt_tokens=3, completion_tokens=2 * len(pieces))
    paused: list[Step] = [step for piece in pieces for step in (Say(piece), Pause(pause_seconds))]
    return [Say(begin), *paused, Say(end)]


def usage_of(gateway: RunningGateway, **asked: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "2+2?"}]} | asked
    answered = gateway.http.post("/v1/chat/completions", json=body)
    assert answered.status_code == 200, answered.text
    if not asked.get("stream"):
        return dict(answered.json()["usage"])
    *_, last, end = (line.removeprefix("data: ") for line in answered.text.splitlines() if line.startswith("data: "))
    assert end == "[DONE]"
    return dict(json.loads(last)["usage"])


@pytest.mark.parametrize("pause_seconds", [0.0, 0.01], ids=["at once", "piece by piece"])
@pytest.mark.parametrize(
    "asked",
    [{}, {"stream": True, "stream_options": {"include_usage": True}}, {"tools": [TOOL]}, {"n": 2}],
    ids=["whole", "streamed", "with tools", "two choices"],
)
def test_usage_of_a_chat_tells_the_tokens_spent_on_thoughts(
    gateway: RunningGateway, engine: ScriptedEngine, asked: dict[str, Any], pause_seconds: float
) -> None:
    engine.script = lambda _: thinks(THOUGHT, pause_seconds)
    # The sixth of the pieces, of two tokens each, holds the end of the thoughts.
    spent = 12 * asked.get("n", 1)
    assert usage_of(gateway, **asked)["completion_tokens_details"] == {"reasoning_tokens": spent}


def test_a_stream_with_tools_tells_it_too(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: thinks(THOUGHT, 0.01)
    told = usage_of(gateway, tools=[TOOL], stream=True, stream_options={"include_usage": True})
    assert told["completion_tokens_details"] == {"reasoning_tokens": 12}


@pytest.mark.parametrize("asked", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_usage_of_an_answer_without_thoughts_has_none(
    gateway: RunningGateway, engine: ScriptedEngine, asked: dict[str, Any]
) -> None:
    engine.script = lambda _: thinks("It is 4.")
    assert "completion_tokens_details" not in usage_of(gateway, **asked)


def test_health_is_a_status_without_a_word(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    healthy = gateway.http.get("/health")
    assert (healthy.status_code, healthy.content) == (200, b"")
    gateway.serve(group(engine.url, ready=False, message="loading"))
    assert gateway.http.get("/health").status_code == 503


def test_the_version_is_told(gateway: RunningGateway) -> None:
    assert gateway.http.get("/version").json() == {"version": version("stageline")}
