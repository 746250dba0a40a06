"""What a client sees when an engine fails: another group, an honest status, or an error event, never a silent end."""

import json
import socket
from typing import Any

import pytest

from gateway_harness import MODEL, RunningGateway, group
from scripted_engine import Drop, Hold, Raw, Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import Admitted, Delta, EngineError, ErrorCode, Failed, Finished, FinishReason

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}
STREAM = BODY | {"stream": True}
ADMITTED = Say(Admitted(prompt_tokens=1))
PIECE = Say(Delta(text="par", token_ids=(1,)))
NOT_READY = EngineError(code=ErrorCode.NOT_READY, message="warming up", retry_after_seconds=7)

BREAKS_BEFORE_TEXT: dict[str, list[Step]] = {
    "drops at once": [Drop()],
    "drops when admitted": [ADMITTED, Drop()],
    "ends when admitted": [ADMITTED],
    "fails when admitted": [ADMITTED, Say(Failed(message="stage 1 died"))],
    "not ready": [Refuse(503, NOT_READY)],
    "draining": [Refuse(503, EngineError(code=ErrorCode.DRAINING, message="draining"))],
    "queue full": [Refuse(503, EngineError(code=ErrorCode.QUEUE_FULL, message="full"))],
    "500 without a reason": [Refuse(500, None)],
    "not JSON": [Raw(b"<html>\n")],
    "starts with a delta": [PIECE],
}
BREAKS_AFTER_TEXT: dict[str, list[Step]] = {
    "drops": [ADMITTED, PIECE, Drop()],
    "ends": [ADMITTED, PIECE],
    "fails": [ADMITTED, PIECE, Say(Failed(message="stage 1 died"))],
    "aborts": [ADMITTED, PIECE, Say(Finished(reason=FinishReason.ABORT, prompt_tokens=1, completion_tokens=1))],
    "is admitted twice": [ADMITTED, PIECE, ADMITTED],
    "sends a broken line": [ADMITTED, PIECE, Raw(b'{"type": "delta"\n')],
    "stalls": [ADMITTED, PIECE, Hold()],
}


def unused_url() -> str:
    """An address nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def events_of(text: str) -> list[Any]:
    """The data of each server-sent event."""
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("steps", BREAKS_BEFORE_TEXT.values(), ids=BREAKS_BEFORE_TEXT.keys())
def test_another_group_takes_over_before_the_first_text(
    gateway: RunningGateway,
    engine: ScriptedEngine,
    other_engine: ScriptedEngine,
    steps: list[Step],
    body: dict[str, Any],
) -> None:
    engine.script = lambda _: steps
    gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
    answered = gateway.http.post("/v1/completions", json=body)
    assert answered.status_code == 200, answered.text
    assert "Hello" in answered.text
    assert "error" not in answered.text
    assert len(engine.requests) == len(other_engine.requests) == 1
    assert engine.requests == other_engine.requests, "the same request, seed included"


def test_a_group_that_can_not_be_reached_is_passed_over(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    gateway.serve(group(unused_url(), 0), group(engine.url, 1))
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("steps", BREAKS_BEFORE_TEXT.values(), ids=BREAKS_BEFORE_TEXT.keys())
def test_without_another_group_the_client_is_told(
    gateway: RunningGateway, engine: ScriptedEngine, steps: list[Step], body: dict[str, Any]
) -> None:
    engine.script = lambda _: steps
    answered = gateway.http.post("/v1/completions", json=body)
    # A stream whose request was admitted has its status already; everything else gets a 503 that may be retried.
    if body is STREAM and steps[0] == ADMITTED:
        *_, last = events_of(answered.text)
        assert last["error"]["type"] == "server_error", answered.text
    else:
        assert answered.status_code == 503, answered.text
        assert answered.headers["retry-after"] == ("7" if steps == BREAKS_BEFORE_TEXT["not ready"] else "1")
        assert answered.json()["error"]["type"] == "server_error"
    assert len(engine.requests) == 1


def test_a_gateway_whose_only_group_is_gone_says_503(gateway: RunningGateway) -> None:
    gateway.serve(group(unused_url()))
    answered = gateway.http.post("/v1/completions", json=STREAM)
    assert answered.status_code == 503
    assert "can't be reached" in answered.json()["error"]["message"]
    assert "127.0.0.1" not in answered.text, "addresses inside the cluster are not for clients"


@pytest.mark.parametrize("steps", BREAKS_AFTER_TEXT.values(), ids=BREAKS_AFTER_TEXT.keys())
def test_a_stream_that_breaks_ends_with_an_error_event(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, steps: list[Step]
) -> None:
    engine.script = lambda _: steps
    gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
    answered = gateway.http.post("/v1/completions", json=STREAM)
    assert answered.status_code == 200
    first, last = events_of(answered.text)
    assert first["choices"][0]["text"] == "par"
    assert last["error"]["code"] == "engine_failed"
    assert other_engine.requests == [], "text was relayed: starting again would repeat it"
    assert gateway.sample("stageline_gateway_broken_answers_total", model_name=MODEL) == 1


@pytest.mark.parametrize("steps", BREAKS_AFTER_TEXT.values(), ids=BREAKS_AFTER_TEXT.keys())
def test_a_whole_answer_that_breaks_is_a_502(
    gateway: RunningGateway, engine: ScriptedEngine, steps: list[Step]
) -> None:
    engine.script = lambda _: steps
    answered = gateway.http.post("/v1/completions", json=BODY)
    assert answered.status_code == 502, answered.text
    assert answered.json()["error"]["code"] == "engine_failed"


@pytest.mark.parametrize(
    ("code", "param"),
    [
        (ErrorCode.INVALID_VALUE, "max_tokens"),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, None),
        (ErrorCode.NO_CHAT_TEMPLATE, None),
    ],
)
def test_a_refusal_of_the_request_itself_is_final(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, code: ErrorCode, param: str | None
) -> None:
    engine.script = lambda _: [Refuse(400, EngineError(code=code, message="no", param=param))]
    gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
    answered = gateway.http.post("/v1/completions", json=STREAM)
    assert answered.status_code == 400
    assert answered.json()["error"] == {
        "message": "no",
        "type": "invalid_request_error",
        "param": param or "prompt",
        "code": code.value,
    }
    assert other_engine.requests == []


def test_idle_groups_take_turns(gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine) -> None:
    gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
    for _ in range(6):
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 200
    assert len(engine.requests) == len(other_engine.requests) == 3


def test_an_answer_in_two_halves_of_a_line_is_read_whole(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    lines = b"".join(s.event.model_dump_json().encode() + b"\n" for s in answer("a", "b") if isinstance(s, Say))
    engine.script = lambda _: [Raw(lines[i : i + 7]) for i in range(0, len(lines), 7)]
    answered = gateway.http.post("/v1/completions", json=BODY)
    assert answered.json()["choices"][0]["text"] == "ab"
