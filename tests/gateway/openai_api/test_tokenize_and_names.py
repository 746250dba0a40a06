"""`/tokenize` and `/detokenize` in vLLM's shapes, and the names a client gives its requests."""

import json
from typing import Any

import pytest
from starlette.datastructures import Headers

from processes.gateway_harness import MODEL, RunningGateway, group
from processes.scripted_engine import Refuse, ScriptedEngine
from stageline_api.engine_http import EngineError, ErrorCode
from stageline_gateway.telemetry.tracing import RequestContext, TraceContext

TOKENIZED = (200, '{"token_ids": [5, 6], "max_model_len": 99, "texts": ["a", "b"]}')
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
STATE = "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7,tenant@vendor=a b"
NO_TRACE = f"00-{'0' * 32}-00f067aa0ba902b7-01"


def test_a_prompt_is_tokenized_by_its_model(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.replies["POST /v1/tokenize"] = TOKENIZED
    body = {"model": MODEL, "prompt": "ab", "return_token_strs": True, "add_special_tokens": False}
    answered = gateway.http.post("/tokenize", json=body)
    assert answered.json() == {"count": 2, "max_model_len": 99, "tokens": [5, 6], "token_strs": ["a", "b"]}
    asked = json.loads(engine.asked[0][1])
    assert asked == {"prompt": {"kind": "text", "text": "ab"}, "add_special_tokens": False, "with_texts": True}


def test_a_chat_is_tokenized_through_its_template(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.replies["POST /v1/tokenize"] = TOKENIZED
    body = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}], "add_generation_prompt": False}
    assert gateway.http.post("/tokenize", json=body).json()["count"] == 2
    prompt = json.loads(engine.asked[0][1])["prompt"]
    assert (prompt["kind"], prompt["add_generation_prompt"]) == ("chat", False)


def test_ids_become_text(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.replies["POST /v1/detokenize"] = (200, '{"text": "ab"}')
    assert gateway.http.post("/detokenize", json={"model": MODEL, "tokens": [5, 6]}).json() == {"prompt": "ab"}
    assert json.loads(engine.asked[0][1]) == {"token_ids": [5, 6]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": MODEL}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ("/tokenize", {"model": "absent", "prompt": "a"}, 404, "model"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"model": MODEL}, 400, "tokens"),
    ],
    ids=str,
)
def test_bad_bodies_are_refused_by_name(gateway: RunningGateway, path: str, body: Any, status: int, param: str) -> None:
    answered = gateway.http.post(path, json=body)
    assert (answered.status_code, answered.json()["error"]["param"]) == (status, param), answered.text


def test_what_an_engine_can_not_do_is_said(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    body = {"model": MODEL, "tokens": [9]}
    engine.replies["POST /v1/detokenize"] = (400, '{"code": "invalid_value", "message": "no 9", "param": "tokens"}')
    refused = gateway.http.post("/detokenize", json=body)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no 9")
    engine.replies["POST /v1/detokenize"] = (200, "not JSON")
    assert gateway.http.post("/detokenize", json=body).status_code == 502
    gateway.serve(group(engine.url, ready=False, message="loading"))
    unready = gateway.http.post("/detokenize", json=body)
    assert (unready.status_code, unready.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("stream", [False, True])
def test_the_clients_names_go_to_the_engine_and_back(
    gateway: RunningGateway, engine: ScriptedEngine, stream: bool
) -> None:
    headers = {"x-request-id": "mine 7", "traceparent": TRACE, "tracestate": STATE}
    body = {"model": MODEL, "prompt": "x", "stream": stream}
    answered = gateway.http.post("/v1/completions", json=body, headers=headers)
    assert answered.headers["x-request-id"] == "mine 7"
    asked = engine.requests[0]
    assert (asked.client_request_id, asked.traceparent, asked.tracestate) == ("mine 7", TRACE, STATE)
    assert asked.request_id.startswith("cmpl-"), "two clients may use one name"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokenizing_carries_the_clients_names_too(gateway: RunningGateway, engine: ScriptedEngine, path: str) -> None:
    engine.replies |= {"POST /v1/tokenize": TOKENIZED, "POST /v1/detokenize": (200, '{"text": "ab"}')}
    headers = {"x-request-id": "mine-7", "traceparent": TRACE, "tracestate": "a=b"}
    body: dict[str, Any] = {"model": MODEL} | ({"prompt": "ab"} if path == "/tokenize" else {"tokens": [5]})
    answered = gateway.http.post(path, json=body, headers=headers)
    assert (answered.status_code, answered.headers["x-request-id"]) == (200, "mine-7")
    [told] = engine.asked_with
    assert {name: told[name] for name in headers} == headers
    refused = gateway.http.post(path, json=body | {"model": "absent"}, headers=headers)
    assert (refused.status_code, refused.headers["x-request-id"]) == (404, "mine-7")


@pytest.mark.parametrize(
    ("states", "kept"),
    [
        (["a=1", "b=2"], "a=1,b=2"),
        (["a=1 , ,b=2,"], "a=1,b=2"),
        (["a=1", "no value"], None),
        (["A=1"], None),
        (["a=" + "x" * 256], "a=" + "x" * 256),
        (["a=" + "x" * 257], None),
        ([f"k{index}={'x' * 50}" for index in range(10)], None),
        (["a=caf\u00e9"], None),
        ([""], None),
    ],
    ids=ascii,
)
def test_the_trace_state_is_one_list_that_is_kept_whole_or_left_out(states: list[str], kept: str | None) -> None:
    raw = [(b"traceparent", TRACE.encode()), *((b"tracestate", one.encode("latin-1")) for one in states)]
    assert RequestContext.of(Headers(raw=raw)).trace == TraceContext(TRACE, kept)
    assert RequestContext.of(Headers(raw=raw[1:])).trace == TraceContext(), "without a parent it means nothing"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-request-id": "x" * 129, "traceparent": TRACE + "-00"},
        {"x-request-id": "caf\u00e9".encode("latin-1"), "traceparent": NO_TRACE},
        {"x-request-id": "a\tb", "traceparent": "ff" + TRACE[2:]},
    ],
    ids=ascii,
)  # fmt: skip
def test_names_that_can_not_be_used_are_replaced(
    gateway: RunningGateway, engine: ScriptedEngine, headers: dict[str, Any]
) -> None:
    answered = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
    asked = engine.requests[0]
    assert (asked.client_request_id, asked.traceparent) == (None, None)
    assert answered.headers["x-request-id"] == asked.request_id == answered.json()["id"]


def test_refusals_are_named_too(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [Refuse(400, EngineError(code=ErrorCode.INVALID_VALUE, message="no"))]
    for body in ({"model": MODEL, "prompt": "x"}, {}):
        named = gateway.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert (named.status_code, named.headers["x-request-id"]) == (400, "mine")
    assert gateway.http.post("/v1/completions", json={}).headers["x-request-id"].startswith("req-")
