"""What a client sees when an engine fails: another group, an honest status, or an error event, never a silent end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes.free_ports import free_port
from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Drop, Hold, Raw, Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import (
    Admitted,
    Delta,
    EngineError,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
)
from stageline_gateway.openai_api.answer_shapes import CompletionShape
from stageline_gateway.settings import GatewaySettings

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
}
STALL_SECONDS = 1.0


def patient(directory: Path) -> GatewaySettings:
    """Of a gateway that waits for groups longer than any test takes."""
    return GatewaySettings(
        directory / "endpoints.json", connect_timeout_seconds=60, hold_seconds=60, resume_window_seconds=600
    )


def unused_url() -> str:
    """An address nothing listens on."""
    return f"http://127.0.0.1:{free_port()}"


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
    [first], [second] = engine.requests, other_engine.requests
    assert first.sampling == second.sampling, "seed included"
    assert (first.prompt, ()) == (second.prompt, second.generated_token_ids)
    assert first.request_id != second.request_id, "the first engine may still hold the first"


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
    gateway: RunningGateway, engine: ScriptedEngine, steps: list[Step]
) -> None:
    engine.script = lambda _: steps
    assert_stream_breaks(gateway)


def assert_stream_breaks(gateway: RunningGateway) -> None:
    """A stream ends with an error event after its first text."""
    answered = gateway.http.post("/v1/completions", json=STREAM)
    assert answered.status_code == 200
    first, last = events_of(answered.text)
    assert first["choices"][0]["text"] == "par"
    assert last["error"]["code"] == "engine_failed"
    assert gateway.sample("stageline_gateway_broken_answers_total", model_name=MODEL) == 1


@pytest.mark.parametrize("steps", BREAKS_AFTER_TEXT.values(), ids=BREAKS_AFTER_TEXT.keys())
def test_a_whole_answer_that_breaks_is_a_502(
    gateway: RunningGateway, engine: ScriptedEngine, steps: list[Step]
) -> None:
    engine.script = lambda _: steps
    assert_whole_answer_breaks(gateway)


def assert_whole_answer_breaks(gateway: RunningGateway) -> None:
    answered = gateway.http.post("/v1/completions", json=BODY)
    assert answered.status_code == 502, answered.text
    assert answered.json()["error"]["code"] == "engine_failed"


@pytest.mark.parametrize("breaks", [assert_stream_breaks, assert_whole_answer_breaks], ids=["streamed", "whole"])
def test_an_engine_that_stalls_breaks_an_answer_too(
    tmp_path: Path, engine: ScriptedEngine, breaks: Callable[[RunningGateway], None]
) -> None:
    engine.script = lambda _: [ADMITTED, PIECE, Hold()]
    settings = GatewaySettings(tmp_path / "stall.json", stall_timeout_seconds=STALL_SECONDS, resume_window_seconds=0)
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        breaks(gateway)


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


TOO_COMPLEX = Failed(message="the grammar became too complex to follow", is_final=True)


@pytest.mark.parametrize(
    "steps", [[ADMITTED, Say(TOO_COMPLEX)], [ADMITTED, PIECE, Say(TOO_COMPLEX)]], ids=["at once", "later"]
)
def test_an_answer_that_no_engine_could_finish_is_tried_once_and_blames_nobody(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, steps: list[Step]
) -> None:
    engine.script = other_engine.script = lambda _: steps
    gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
    for _ in range(4):
        answered = gateway.http.post("/v1/completions", json=BODY)
        assert (answered.status_code, answered.json()["error"]["code"]) == (400, "answer_failed"), answered.text
        last = events_of(gateway.http.post("/v1/completions", json=STREAM).text)[-1]
        assert (last["error"]["code"], last["error"]["message"]) == ("answer_failed", TOO_COMPLEX.message)
    assert len(engine.requests) + len(other_engine.requests) == 8, "one run each"
    assert gateway.sample("stageline_gateway_circuits_open", model_name=MODEL) == 0
    assert gateway.sample("stageline_gateway_broken_answers_total", model_name=MODEL) == 0, "no fault of ours"


def test_idle_groups_take_turns(gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine) -> None:
    gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
    for _ in range(6):
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 200
    assert len(engine.requests) == len(other_engine.requests) == 3


def test_a_bug_in_the_gateway_ends_a_stream_with_an_error_event(
    gateway: RunningGateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    gateway.serve(group(engine.url))
    monkeypatch.setattr(CompletionShape, "closing", broken)
    engine.script = lambda _: [ADMITTED, PIECE, Hold(), *answer("b")[1:]]
    with gateway.http.stream("POST", "/v1/completions", json=STREAM) as answered:
        texts = answered.iter_text()
        begun = next(texts)
        engine.release()
        events = events_of(begun + "".join(texts))
    assert events[-1]["error"]["code"] == "internal", events
    engine.script = lambda _: answer("a", "b")
    monkeypatch.setattr(CompletionShape, "whole", broken)
    assert gateway.http.post("/v1/completions", json=BODY).status_code == 500
    gateway.settle()
    assert gateway.sample("stageline_gateway_requests_total", model_name=MODEL, code="200") == 1
    assert gateway.sample("stageline_gateway_requests_total", model_name=MODEL, code="500") == 1
    assert gateway.admin.get("/status").json()["open_requests"] == 0


def test_a_request_whose_groups_hang_is_sent_to_no_third(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    """It may be what hangs them; a request that was only there when one hung goes on elsewhere."""
    hung = Failed(message="the group failed: no plan finished within 30 s", is_suspect=True)
    for script in (engine, other_engine):
        script.script = lambda _: [ADMITTED, Say(hung)]
    with running_gateway(patient(tmp_path)) as gateway:
        gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
        refused = gateway.http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503, refused.text
        assert len(engine.requests) + len(other_engine.requests) == 2
        labels = {"model_name": MODEL, "kind": "hung"}
        assert gateway.sample("stageline_gateway_engine_losses_total", **labels) == 2
        other_engine.script = lambda _: answer("well")
        done = [gateway.http.post("/v1/completions", json=BODY).status_code for _ in range(4)]
        assert done == [200] * 4, done


@pytest.mark.parametrize("begins", [[ADMITTED], [ADMITTED, PIECE]], ids=["before text", "behind text"])
def test_a_request_that_ends_three_groups_in_a_row_is_sent_to_no_fourth(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine, begins: list[Step]
) -> None:
    """As what takes more memory than there is does, wherever it is computed: it comes no token further."""

    def ends_its_group(request: GenerateRequest) -> list[Step]:
        return [ADMITTED, Drop()] if request.generated_token_ids else [*begins, Drop()]

    engine.script = other_engine.script = ends_its_group
    with running_gateway(patient(tmp_path)) as gateway:
        gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
        [*_, error] = events_of(gateway.http.post("/v1/completions", json=STREAM).text) or [None]
        refused = gateway.http.post("/v1/completions", json=BODY)
        for told in (str(error), refused.text):
            assert "Engines were lost 3 times in a row" in told, (error, refused.text)
        assert len(engine.requests) + len(other_engine.requests) == 6, "two requests, three groups each"
        assert gateway.sample("stageline_gateway_resumes_total", model_name=MODEL, outcome="exhausted") == 2
        engine.script = other_engine.script = lambda _: answer("well")
        assert gateway.http.post("/v1/completions", json=BODY).status_code == 200


def test_a_request_that_waited_while_its_groups_ended_is_not_taken_for_their_end(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    ended = Failed(message="the group failed: stage 1 died", was_waiting=True)

    def script(_: GenerateRequest) -> list[Step]:
        runs = len(engine.requests) + len(other_engine.requests)
        return answer("well") if runs > 5 else [ADMITTED, Say(ended)]

    engine.script = other_engine.script = script
    with running_gateway(patient(tmp_path)) as gateway:
        gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
        whole = gateway.http.post("/v1/completions", json=BODY)
        assert (whole.status_code, whole.json()["choices"][0]["text"]) == (200, "well"), whole.text
