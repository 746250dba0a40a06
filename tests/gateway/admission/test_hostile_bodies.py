"""Bodies made to cost: as large as they may be, and refused in a fixed time of the event loop and in bounded memory."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_core import to_json

from hostility.repeated_parts import BODY_BYTES, REPEATED
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import Hold, Say, ScriptedEngine
from stageline_api.engine_http import (
    Admitted,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
    TopLogprob,
)
from stageline_gateway.admission.request_body import FEW, MOST_OBJECTS, check_shape, parse_object, shape_of
from stageline_gateway.endpoints.tokenizing import parse_detokenize
from stageline_gateway.errors import SHOWN_CHARACTERS, ApiError, shown
from stageline_gateway.openai_api.dialects.prepared_message import prepare_message
from stageline_gateway.openai_api.dialects.prepared_response import prepare_response
from stageline_gateway.openai_api.validation import parse_chat, parse_completion
from stageline_gateway.settings import GatewaySettings
from stageline_runtime.engine.edge.http_errors import invalid_body

LOOP_SECONDS: Final = 0.05
"""Of CPU; a machine ten times slower than the one that this was measured on needs no more than it has."""
SLOW_MACHINE: Final = 10
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("name", REPEATED)
def test_a_refusal_of_a_large_body_hardly_costs_the_loop(gateway: RunningGateway, name: str) -> None:
    path, body = REPEATED[name].path, REPEATED[name].body()
    gateway.http.get("/healthz")
    before = gateway.loop_seconds()
    refused = gateway.http.post(path, content=body, headers=JSON)
    spent = gateway.loop_seconds() - before
    assert refused.status_code == 400, refused.text
    assert len(refused.content) < 2000, refused.text
    assert spent < LOOP_SECONDS * SLOW_MACHINE, f"{name}: {spent:.3f} s of the loop for {len(body)} bytes"


@pytest.mark.parametrize("name", REPEATED)
def test_a_refusal_of_a_large_body_holds_little_more_than_the_body(name: str) -> None:
    """Errors for every item would be a thousand times that."""
    path, body = REPEATED[name].path, REPEATED[name].body()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            _checked(path, body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 8 * len(body), f"{name}: {most_bytes} bytes for {len(body)}"


def _checked(path: str, body: bytes) -> object:
    check_shape(shape_of(body))
    parse: Any = {
        "/v1/chat/completions": lambda fields: parse_chat(fields, {}),
        "/v1/completions": lambda fields: parse_completion(fields, {}),
        "/detokenize": parse_detokenize,
        "/v1/responses": lambda fields: prepare_response(fields, strict=True),
        "/v1/messages": lambda fields: prepare_message(fields, strict=True),
    }[path]
    return parse(parse_object(body))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a",[]{}\\:', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='"{,\\', max_size=4), inner, max_size=5)
    ),
    max_leaves=40,
)


@given(VALUES)
def test_a_shape_counts_what_parsing_makes_and_nothing_inside_strings(value: Any) -> None:
    raw = to_json({"padding": [0] * FEW, "value": value})
    shape = shape_of(raw)
    assert shape.objects == 2 + objects_in(value)
    assert shape.values >= values_in(value) + FEW


def objects_in(value: Any) -> int:
    match value:
        case dict():
            return 1 + sum(map(objects_in, value.values()))
        case list():
            return 1 + sum(map(objects_in, value))
        case _:
            return 0


def values_in(value: Any) -> int:
    match value:
        case dict():
            return sum(map(values_in, value.values()))
        case list():
            return sum(map(values_in, value))
        case _:
            return 1


def test_text_full_of_marks_is_no_structure() -> None:
    """A prompt may be a megabyte of JSON or of code."""
    shape = shape_of(to_json({"model": MODEL, "prompt": '{"a": [1, 2, "x\\\\"], }' * 40_000}))
    assert (shape.objects, shape.values) == (1, 2)


def test_what_a_body_will_hold_is_counted_before_it_is_made(gateway: RunningGateway) -> None:
    """Eight thousand empty messages are a quarter of a megabyte, and become eight."""
    body = {"model": "absent", "messages": [{"role": "user", "content": ""}] * 8192}
    assert gateway.http.post("/v1/chat/completions", json=body).status_code == 404
    held = gateway.admin.get("/status").json()["bodies"]
    assert held["most_bytes"] > 8 * 1024 * 1024, held
    assert held["bytes"] == 0, held


def test_one_more_object_than_allowed_is_refused_by_name() -> None:
    with pytest.raises(ApiError, match="32769 objects and lists; at most 32768") as refused:
        check_shape(shape_of(b"[" + b"{}," * MOST_OBJECTS + b"1]"))
    assert (refused.value.status, refused.value.code) == (400, "body_too_complex")


@pytest.mark.parametrize("value", [[[1] * 3_000_000], {"a": {"b": ["x" * 4_000_000]}}, "é" * 4_000_000, 10**4000])
def test_a_value_is_shown_without_being_written_out(value: object) -> None:
    tracemalloc.start()
    try:
        text = shown(value)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(text) <= SHOWN_CHARACTERS + 1
    assert most_bytes < 100_000


def test_the_engine_stops_at_the_first_wrong_id_too() -> None:
    body = b'{"request_id":"a","prompt":{"kind":"tokens","token_ids":[' + b'"x",' * 1_000_000 + b"1]}}"
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError) as refused:
            GenerateRequest.model_validate_json(body)
        refusal = invalid_body(refused.value)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusal.param == "prompt"
    assert refusal.message.startswith("prompt.token_ids.0: "), refusal.message
    assert refused.value.error_count() <= 2
    assert most_bytes < 8 * len(body)


@pytest.mark.parametrize("stop", ["x" * BODY_BYTES, ["ok", "x" * 257]])
def test_a_stop_string_is_short(gateway: RunningGateway, stop: Any) -> None:
    """An automaton of four million characters would be built between two tokens of everybody else."""
    body = to_json({"model": MODEL, "prompt": "x", "stop": stop})
    before = gateway.loop_seconds()
    refused = gateway.http.post("/v1/completions", content=body[: BODY_BYTES + 1024], headers=JSON)
    spent = gateway.loop_seconds() - before
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] in ("stop", "stop[1]"), refused.text
    assert "256 characters" in refused.json()["error"]["message"]
    assert spent < LOOP_SECONDS * SLOW_MACHINE, f"{spent:.3f} s"


def many_tokens(count: int, top: int) -> list[Any]:
    """An answer of `count` tokens with `top` alternatives each."""
    other = [TopLogprob(token_id=index, bytes=(97 + index, 98, 99, 100), logprob=-1.25) for index in range(top)]
    one = TokenLogprob(token_id=1, bytes=(97, 98, 99, 100), logprob=-0.5, top_logprobs=tuple(other))
    deltas = [Say(Delta(text="abcd", token_ids=(1,), logprobs=(one,))) for _ in range(count)]
    end = Finished(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=count)
    return [Say(Admitted(prompt_tokens=1)), *deltas, Hold(), Say(end)]


def test_log_probabilities_of_a_whole_answer_are_held_as_json_and_counted(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: many_tokens(500, 20)
    body = {"model": MODEL, "prompt": "x", "logprobs": 20, "max_tokens": 500}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(gateway.http.post, "/v1/completions", json=body)
        held = gateway.admin.get("/status").json()["bodies"]
        eventually(lambda: held_bytes(gateway) > 500 * 20 * 10, lambda: f"not counted: {held_bytes(gateway)}")
        eventually(lambda: len(engine.requests) == 1, "asked")
        engine.release()
        answer = asked.result()
    held = gateway.admin.get("/status").json()["bodies"]
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert [len(values) for values in logprobs.values()] == [500] * 4
    assert logprobs["text_offset"] == list(range(0, 2000, 4))
    assert held["bytes"] == 0
    assert len(answer.content) / 2 < held["most_bytes"] < 4 * len(answer.content), (held, len(answer.content))


def held_bytes(gateway: RunningGateway) -> int:
    return int(gateway.admin.get("/status").json()["bodies"]["bytes"])


def test_an_answer_that_outgrows_the_room_is_refused(tmp_path: Path, engine: ScriptedEngine) -> None:
    engine.script = lambda _: many_tokens(500, 20)
    with running_gateway(GatewaySettings(tmp_path / "endpoints.json", body_room_bytes=100_000)) as gateway:
        gateway.serve(group(engine.url))
        body = {"model": MODEL, "prompt": "x", "logprobs": 20}
        refused = gateway.http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "body_room")
        eventually(lambda: held_bytes(gateway) == 0, "it gave everything back")


def test_copies_of_a_prompt_for_many_choices_are_counted_before_they_are_made(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    asked = to_json({"model": MODEL, "n": 128, "prompt": "x" * (BODY_BYTES - 1024)})
    refused = gateway.http.post("/v1/completions", content=asked, headers=JSON)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n"), refused.text
    assert "128 choices of a body of" in refused.json()["error"]["message"]
    assert engine.requests == []
    fitting = to_json({"model": MODEL, "n": 8, "prompt": "x" * 100_000})
    assert gateway.http.post("/v1/completions", content=fitting, headers=JSON).status_code == 200
    held = gateway.admin.get("/status").json()["bodies"]
    assert 800_000 < held["most_bytes"] < 8 * BODY_BYTES, held


@pytest.mark.parametrize("streams", [True, False])
def test_a_large_request_that_the_answer_repeats_hardly_costs_the_loop(
    gateway: RunningGateway, engine: ScriptedEngine, streams: bool
) -> None:
    """A response repeats its instructions: three times in a stream, six bytes for each of its characters: 37 MB.

    Writing them takes most of that; encoding takes a sixth, with the interpreter locked, so a thread would not help.
    """
    body = to_json({"model": MODEL, "instructions": "é" * (BODY_BYTES // 2 - 512), "input": "x", "stream": streams})
    gateway.http.get("/healthz")
    before = gateway.loop_seconds()
    answer = gateway.http.post("/v1/responses", content=body, headers=JSON)
    spent = gateway.loop_seconds() - before
    assert answer.status_code == 200, answer.text[:300]
    assert len(engine.requests) == 1
    assert answer.content.count(b"\\u00e9") == (3 if streams else 1) * (BODY_BYTES // 2 - 512)
    assert spent < LOOP_SECONDS * SLOW_MACHINE, f"{spent:.3f} s of the loop"
