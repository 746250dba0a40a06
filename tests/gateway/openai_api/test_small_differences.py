"""Bodies that differ a little from the usual: the fast path and the general one make the same of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Say, ScriptedEngine
from stageline_api.engine_http import Admitted, ChatPrompt, Delta, Finished, FinishReason
from stageline_gateway.admission.request_body import parse_object
from stageline_gateway.errors import ApiError
from stageline_gateway.openai_api.schemas import without_idle_names
from stageline_gateway.openai_api.translate import prepare_chat
from stageline_gateway.settings import GatewaySettings

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
}
JSON = {"content-type": "application/json"}
everywhere = pytest.mark.parametrize("path", ASKS)


@everywhere
@pytest.mark.parametrize("extra", [{}, {"top_k": 3}], ids=["plain", "general"])
def test_a_byte_order_mark_changes_nothing(
    gateway: RunningGateway, engine: ScriptedEngine, path: str, extra: dict[str, Any]
) -> None:
    body = json.dumps(ASKS[path] | {"model": MODEL} | extra).encode()
    for mark in (b"", b"\xef\xbb\xbf"):
        answered = gateway.http.post(path, content=mark + body, headers=JSON)
        assert answered.status_code == 200, answered.text
    first, second = (json.loads(one.prompt.to_json()) for one in engine.requests)
    assert first == second


@everywhere
@pytest.mark.parametrize("number", ["1e400", "-1e999", "1" + "0" * 400 + ".5"])
def test_a_number_beyond_a_double_is_named(gateway: RunningGateway, path: str, number: str) -> None:
    body = json.dumps(ASKS[path] | {"model": MODEL})[:-1] + f', "temperature": {number}}}'
    refused = gateway.http.post(path, content=body, headers=JSON)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert ("'temperature'" in message, "inf" in message) == (True, False), message


def test_such_a_number_is_found_anywhere() -> None:
    with pytest.raises(ApiError, match=r"tools\[1\]\.most"):
        parse_object(b'{"tools": [{}, {"most": 1e309}]}')
    with pytest.raises(ApiError, match=r"'b\[1\]\[0\]\.c'"):
        parse_object(b'{"a": [[], {}, [1.5, {"x": 2}]], "b": [[7], [{"c": -1e309}]]}')
    with pytest.raises(ApiError, match="'' is a number larger"):
        parse_object(b'{"": 1e309}')
    for good in (b'{"a": 1e308}', b'{"a": "1e400"}', b'{"a": 1e-400}', b'{"a": "' + b"1" * 400 + b'"}'):
        assert parse_object(good)


@pytest.mark.parametrize(
    ("message", "content", "num_calls"),
    [
        ({"role": "assistant", "content": []}, "", 0),
        ({"role": "assistant", "content": None, "tool_calls": []}, "", 0),
        ({"role": "assistant", "tool_calls": []}, "", 0),
        ({"role": "assistant", "content": "Yes", "tool_calls": []}, "Yes", 0),
        ({"role": "user", "content": "Hi", "tool_calls": []}, "Hi", 0),
        ({"role": "assistant", "tool_calls": [{name: CALL[name] for name in ("id", "function")}]}, "", 1),
        ({"role": "assistant", "content": [], "tool_calls": [CALL]}, "", 1),
        ({"role": "tool", "tool_call_id": "c", "content": []}, "", 0),
        ({"role": "tool", "tool_call_id": "c", "content": None}, "", 0),
    ],
)
def test_what_clients_send_for_nothing_is_nothing(message: dict[str, Any], content: str, num_calls: int) -> None:
    for strict in (False, True):
        prompt = prepare_chat({"model": MODEL, "messages": [USER, message]}, strict).generate.prompt
        assert isinstance(prompt, ChatPrompt)
        told = prompt.messages[1]
        assert (told.content, len(told.tool_calls)) == (content, num_calls)


IDLE = [
    True,
    {},
    {"type": "string"},
    {"type": ["string", "null"]},
    {"type": "string", "description": "A town"},
    {"minLength": 0},
]
BOUND = [
    False,
    {"pattern": "^a"},
    {"type": "string", "maxLength": 3},
    {"enum": ["a"]},
    {"type": "integer"},
    {"minLength": 1},
]


@pytest.mark.parametrize("names", [*IDLE, *BOUND], ids=repr)
def test_property_names_that_restrict_nothing_are_left_out(names: Any) -> None:
    record = {"type": "object", "additionalProperties": {"type": "string"}, "propertyNames": names}
    schema = {"type": "object", "properties": {"propertyNames": {"type": "string"}, "towns": record}, "enum": [record]}
    done = json.loads(without_idle_names(json.dumps(schema)) or "")
    assert ("propertyNames" in done["properties"]["towns"]) == (names in BOUND)
    assert (done["properties"]["propertyNames"], done["enum"]) == ({"type": "string"}, [record])


def test_every_kind_of_schema_is_read_so() -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": record}}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": record}}},
        {"structured_outputs": {"json": record}},
        {"structured_outputs": {"json": json.dumps(record)}},
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ):
        sampling = prepare_chat({"model": MODEL, "messages": [USER]} | fields, False).generate.sampling
        assert sampling.json_schema is not None
        assert "propertyNames" not in sampling.json_schema
        assert "integer" in sampling.json_schema


def test_a_stream_of_a_message_counts_its_prompt_once(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    end = Finished(reason=FinishReason.STOP, prompt_tokens=9, completion_tokens=1, cached_tokens=4)
    engine.script = lambda _: [Say(Admitted(prompt_tokens=9)), Say(Delta(text="Hi", token_ids=(1,))), Say(end)]
    asked = ASKS["/v1/messages"] | {"model": MODEL}
    told = gateway.http.post("/v1/messages", json=asked | {"stream": True}).text
    events = [json.loads(event.partition("data: ")[2]) for event in told.strip().split("\n\n")]
    begin, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert begin | {"output_tokens": 1} == last
    for usage in (last, gateway.http.post("/v1/messages", json=asked).json()["usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 9


def test_anthropics_clients_find_the_id_of_an_answer(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.replies["POST /v1/tokenize"] = 200, '{"token_ids": [1], "max_model_len": 8}'
    asked = ASKS["/v1/messages"] | {"model": MODEL}
    for path, fields, status in (
        ("/v1/messages", asked, 200),
        ("/v1/messages", asked | {"stream": True}, 200),
        ("/v1/messages", asked | {"temperature": -1}, 400),
        ("/v1/messages/count_tokens", asked, 200),
        ("/v1/messages/count_tokens", {}, 400),
        ("/v1/messages/absent", {}, 404),
    ):
        answered = gateway.http.post(path, json=fields)
        assert (answered.status_code, bool(answered.headers["request-id"])) == (status, True)
        mine = gateway.http.post(path, json=fields, headers={"x-request-id": "mine"})
        assert status == 404 or mine.headers["request-id"] == "mine"
    assert (
        "request-id"
        not in gateway.http.post("/v1/completions", json=ASKS["/v1/completions"] | {"model": MODEL}).headers
    )


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_a_busy_engine_is_asked_again_later(tmp_path: Path, engine: ScriptedEngine, path: str) -> None:
    settings = GatewaySettings(tmp_path / "endpoints.json", call_timeout_seconds=0.05, retry_after_seconds=3)
    engine.holds_questions = True
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        refused = gateway.http.post(path, json={"model": MODEL, "messages": [USER]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "3"), refused.text
        assert "busy" in refused.text
    engine.release()
