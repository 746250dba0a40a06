"""Whatever a client sends, the answer is a 4xx in OpenAI's form that names the field: never a 500."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import ScriptedEngine
from stageline_gateway.settings import GatewaySettings

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[ScriptedEngine]:
    """One engine for all these tests: hardly any of them reaches it."""
    engine = ScriptedEngine()
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, shared_engine: ScriptedEngine) -> Iterator[RunningGateway]:
    """One gateway for all these tests: a refused request leaves nothing behind."""
    with running_gateway(GatewaySettings(tmp_path_factory.mktemp("gateway") / "endpoints.json")) as gateway:
        gateway.serve(group(shared_engine.url))
        yield gateway


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    """The engine, with what earlier tests asked forgotten."""
    shared_engine.requests.clear()
    return shared_engine


def refusal(gateway: RunningGateway, path: str, content: bytes, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    """The status and the error of a request that must be refused."""
    answered = gateway.http.post(path, content=content, headers=headers)
    assert 400 <= answered.status_code < 500, answered.text
    error = answered.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answered.status_code, error


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**400}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no blanks"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL | {"type": "functions"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 3}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["x" * 70000]}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": ["x" * 70000]}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"x - at `$.logit_bias[...]": 1}, "x - at `$.logit_bias[...]"),
        ({"messages": [{"role": "user", "content": "x", "y` - at `$.model": 1}]}, "messages[0].y` - at `$.model"),
        ({"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "tools[0].function.name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]},
                },
            },
            "tool_choice.allowed_tools.tools[0].type",
        ),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "0"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"documents": [{}]}, "documents"),
        ({"made_up": 1}, "made_up"),
        ({"made_up": None}, "made_up"),
        ({"#text": 1}, "#text"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"seed": "7"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "system", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "nmae": "Bo"}]}, "messages[0].nmae"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_a_bad_chat_field_is_named(
    gateway: RunningGateway, engine: ScriptedEngine, extra: dict[str, Any], param: str
) -> None:
    status, error = refusal(gateway, "/v1/chat/completions", json.dumps(CHAT | extra).encode())
    assert (status, error["param"]) == (400, param), error
    assert param in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [{}]}, "prompt[0]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, 2**40]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "echo": True, "stream": True}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_a_bad_completion_field_is_named(gateway: RunningGateway, extra: dict[str, Any], param: str) -> None:
    status, error = refusal(gateway, "/v1/completions", json.dumps(TEXT | extra).encode())
    assert (status, error["param"]) == (400, param), error


def test_values_that_ask_for_nothing_are_accepted(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    asks_nothing = {
        "n": 1,
        "logprobs": False,
        "tools": [],
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "top_logprobs": None,
        "temperature": None,
        "stop": None,
        "user": "",
        "store": False,
    }
    repeated = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": None}
    body = CHAT | asks_nothing | {"messages": [repeated, *CHAT["messages"]]}
    answered = gateway.http.post("/v1/chat/completions", json=body)
    assert answered.status_code == 200, answered.text
    assert engine.requests[0].sampling.temperature is None, "the model's own"


OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TURNS_OFF = dict(zip(OWN, (1.0, 1.0, 0, 0.0, 1.0), strict=True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", TEXT),
        ("/v1/responses", {"model": CHAT["model"], "input": "Hi."}),
        ("/v1/messages", {"model": CHAT["model"], "max_tokens": 4, "messages": CHAT["messages"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_how_to_sample_is_left_to_the_model_where_the_client_says_nothing(
    path: str, body: dict[str, Any], gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    answered = gateway.http.post(path, json=body)
    assert answered.status_code == 200, answered.text
    sampling = engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in OWN} == dict.fromkeys(OWN)


def test_vllms_word_for_no_limit_of_candidates_is_taken(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    answered = gateway.http.post("/v1/chat/completions", json=CHAT | {"top_k": -1})
    assert answered.status_code == 200, answered.text
    assert engine.requests[0].sampling.top_k == 0


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)], ids=["chat", "text"]
)
def test_what_the_client_says_reaches_the_engine_also_where_it_turns_something_off(
    path: str, body: dict[str, Any], gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    answered = gateway.http.post(path, json=body | TURNS_OFF)
    assert answered.status_code == 200, answered.text
    sampling = engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in OWN} == TURNS_OFF


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": NaN}',
        b'{"temperature": 1e999}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": ' + b'{"a":' * 150 + b"1" + b"}" * 151,
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda content: ascii(content[:24]),
)
def test_a_body_that_is_not_good_json_is_refused(gateway: RunningGateway, content: bytes) -> None:
    status, _ = refusal(gateway, "/v1/chat/completions", content)
    assert status == 400


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": ";;;"},
    ],
    ids=str,
)
def test_a_body_that_is_not_declared_as_json_is_refused(gateway: RunningGateway, headers: dict[str, str]) -> None:
    status, _ = refusal(gateway, "/v1/completions", json.dumps(TEXT).encode(), headers)
    assert status == 415


def test_a_body_that_is_too_large_is_refused(gateway: RunningGateway) -> None:
    status, error = refusal(gateway, "/v1/completions", json.dumps(TEXT | {"prompt": "x" * 5_000_000}).encode())
    assert (status, error["code"]) == (413, "body_too_large")


def test_a_body_of_unknown_length_is_bounded_too(gateway: RunningGateway) -> None:
    def chunks() -> Any:
        yield b'{"prompt": "'
        for _ in range(5):
            yield b"x" * 1_000_000

    answered = gateway.http.post("/v1/completions", content=chunks(), headers=JSON)
    assert answered.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/absent", 404),
        ("GET", "/absent", 404),
        ("GET", "/v1/models/%ff%00", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/embeddings", 400),
    ],
)
def test_unknown_paths_and_methods_use_the_same_form(
    gateway: RunningGateway, method: str, path: str, status: int
) -> None:
    answered = gateway.http.request(method, path)
    assert answered.status_code == status
    assert answered.json()["error"]["type"] == "invalid_request_error"


FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "stream", "n",
     "stream_options", "logprobs", "stop_token_ids", "user", "ignore_eos", "role", "content", "type", "text"]
)  # fmt: skip
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([MODEL, "user", "text"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    base=st.sampled_from([CHAT, TEXT, {}]),
    extra=st.dictionaries(FIELDS, JSON_VALUES, max_size=3),
)
def test_no_json_object_makes_the_gateway_fail(
    gateway: RunningGateway, path: str, base: dict[str, Any], extra: dict[str, Any]
) -> None:
    answered = gateway.http.post(path, content=json.dumps(base | extra).encode(), headers=JSON)
    assert answered.status_code in {200, 400, 404}, answered.text
    if answered.status_code != 200:
        assert answered.json()["error"]["message"]


@given(content=st.binary(max_size=200))
def test_no_bytes_make_the_gateway_fail(gateway: RunningGateway, content: bytes) -> None:
    refusal(gateway, "/v1/chat/completions", content)


@pytest.mark.parametrize(
    ("path", "sent", "words"),
    [
        ("/v1/responses", {"input": "x", "background": True}, "'background' = true is not supported by this server"),
        ("/v1/responses", {"input": "x", "background": True}, "leave it out or send false."),
        ("/v1/chat/completions", CHAT | {"skip_special_tokens": False}, "= false is not supported"),
        ("/v1/chat/completions", CHAT | {"skip_special_tokens": False}, "or send true."),
        ("/v1/chat/completions", CHAT | {"audio": {"voice": [None, True]}}, "'audio' = {\"voice\": [null, true]} is"),
        ("/v1/completions", TEXT | {"response_format": {}}, 'leave it out or send {"type": "text"}.'),
        ("/v1/completions", TEXT | {"temperature": False}, "got false."),
        ("/v1/completions", TEXT | {"structured_outputs": {"json_object": False}}, "should be true; got false."),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x", "audio": 1}]},
            "should be null; got 1.",
        ),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_values_are_named_in_jsons_words(gateway: RunningGateway, path: str, sent: dict[str, Any], words: str) -> None:
    answered = gateway.http.post(path, json={"model": MODEL} | sent)
    assert answered.status_code == 400
    assert words in answered.json()["error"]["message"]
