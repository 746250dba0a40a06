"""`/v1/messages` in Anthropic's words: what the engine is asked, what comes back, and errors in Anthropic's form.

The real client is in tests/clients.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from oracles.tokenizer_models import write_byte_level
from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import (
    Admitted,
    ChatPrompt,
    Delta,
    EngineError,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    ThoughtStart,
    ToolCallFormat,
)
from stageline_gateway.settings import GatewaySettings
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.chat_template import no_tool_format
from stageline_runtime.engine.text.prompts import PromptReader

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Rain?"}]}
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Of a place",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
MANY_CALLS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Hm."},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}] * 129},
]


def thinks_and_calls(_: Any) -> list[Any]:
    text = '<think>Look.</think>So: <tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
    pieces = [Say(Delta(text=text[at : at + 7], token_ids=(at,))) for at in range(0, len(text), 7)]
    end = Finished(reason=FinishReason.STOP, prompt_tokens=9, completion_tokens=len(pieces), cached_tokens=4)
    begin = Admitted(prompt_tokens=9, tool_call_format=ToolCallFormat.TAGGED, thoughts=ThoughtStart.TAGGED)
    return [Say(begin), *pieces, Say(end)]


def streamed(gateway: RunningGateway, **extra: Any) -> list[dict[str, Any]]:
    answered = gateway.http.post("/v1/messages", json=ASK | {"stream": True} | extra)
    assert answered.status_code == 200, answered.text
    events = []
    for chunk in answered.text.strip().split("\n\n"):
        name, data = chunk.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


CONTENT = [
    {"type": "thinking", "thinking": "Look.", "signature": ""},
    {"type": "text", "text": "So: "},
    {"type": "tool_use", "name": "weather", "input": {"place": "Oslo"}},
]


def without_id(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name != "id"}


def test_a_message_has_thoughts_text_and_calls(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = thinks_and_calls
    message = gateway.http.post("/v1/messages", json=ASK | {"tools": [TOOL], "system": "Be brief."}).json()
    assert [without_id(block) for block in message["content"]] == CONTENT
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "tool_use")
    assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"]) == (5, 4)
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(turn.role, turn.content) for turn in prompt.messages] == [("system", "Be brief."), ("user", "Rain?")]
    assert (prompt.tools[0].name, prompt.tools[0].parameters) == ("weather", TOOL["input_schema"])
    assert engine.requests[0].sampling.max_tokens == 9


def test_a_stream_builds_the_same(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = thinks_and_calls
    events = streamed(gateway, tools=[TOOL])
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for kind, _ in groupby(events, lambda event: event["type"])] == [
        "message_start", *block, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            words = [value for name, value in event["delta"].items() if name != "type"]
            texts[event["index"]] = texts.get(event["index"], "") + words[0]
    assert (texts[0], texts[1], json.loads(texts[2])) == ("Look.", "So: ", {"place": "Oslo"})
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_results_of_calls_go_back_to_the_model(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"place": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "wet"}]}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": [CONTENT[0], CONTENT[1], call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]},
    ]
    body = ASK | {"messages": turns, "tools": [TOOL], "metadata": {"user_id": "x"}, "stop_sequences": ["END"]}
    answered = gateway.http.post("/v1/messages", json=body)
    assert answered.json()["content"] == [{"type": "text", "text": "Hello world"}]
    assert answered.headers["x-stageline-ignored"] == "metadata,messages.content.cache_control"
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    _, asked, told, last = prompt.messages
    assert (asked.content, asked.tool_calls[0].arguments) == ("So: ", {"place": "Oslo"})
    assert (told.role, told.tool_call_id, told.content) == ("tool", "c1", "wet")
    assert (last.role, last.content) == ("user", "So?")
    assert engine.requests[0].sampling.stop == ("END",)


def test_the_stop_sequence_that_ended_an_answer_is_named(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    end = Finished(reason=FinishReason.STOP, prompt_tokens=9, completion_tokens=1, stop_string="END")
    engine.script = lambda _: [Say(Admitted(prompt_tokens=9)), Say(Delta(text="So ", token_ids=(1,))), Say(end)]
    asked = {"stop_sequences": ["STOP", "END"]}
    message = gateway.http.post("/v1/messages", json=ASK | asked).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    events = streamed(gateway, **asked)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert events[0]["message"]["stop_sequence"] is None


def test_a_result_that_is_an_error_says_so_to_the_model(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "no such place", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c1", "content": "wet", "is_error": False},
    ]
    turns = [*ASK["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
    assert gateway.http.post("/v1/messages", json=ASK | {"messages": turns, "tools": [TOOL]}).status_code == 200
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [turn.content for turn in prompt.messages[-2:]] == ["Error: no such place", "wet"]


@pytest.mark.parametrize(
    ("last", "is_continued"),
    [
        ({"role": "assistant", "content": "It is"}, True),
        ({"role": "assistant", "content": [{"type": "text", "text": "It is"}]}, True),
        ({"role": "assistant", "content": " "}, False),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}]}, False),
        ({"role": "user", "content": "It is"}, False),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_an_answer_goes_on_with_the_assistants_last_words(
    gateway: RunningGateway, engine: ScriptedEngine, last: dict[str, Any], is_continued: bool
) -> None:
    answered = gateway.http.post("/v1/messages", json=ASK | {"messages": [*ASK["messages"], last]})
    assert answered.status_code == 200, answered.text
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.continue_final_message is is_continued
    assert prompt.add_generation_prompt is not is_continued


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"tools": [TOOL | {"type": "custmo"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "absent"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tools": [TOOL, TOOL]}, "'tools[1].name'"),
        ({"system": "S", "messages": [*ASK["messages"], *MANY_CALLS]}, "'messages[2].content'"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_is_wrong_is_named_in_anthropics_form(
    gateway: RunningGateway, engine: ScriptedEngine, extra: dict[str, Any], named: str
) -> None:
    answered = gateway.http.post("/v1/messages", json=ASK | extra)
    assert answered.status_code == 400
    body = answered.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking,output_config.effort"),
    ],
)
def test_what_the_engine_ignored_is_named_as_the_client_wrote_it(
    gateway: RunningGateway, engine: ScriptedEngine, told: dict[str, Any], named: str
) -> None:
    begin = Say(Admitted(prompt_tokens=3, ignored=("reasoning_effort",)))
    engine.script = lambda _: [begin, *answer("Hi")[1:]]
    assert gateway.http.post("/v1/messages", json=ASK | told).headers["x-stageline-ignored"] == named


def test_the_engines_refusals_and_failures_have_that_form_too(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    long = EngineError(code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, message="too long")
    engine.script = lambda _: [Refuse(400, long)]
    assert "too long" in gateway.http.post("/v1/messages", json=ASK).json()["error"]["message"]
    begun = [Say(Admitted(prompt_tokens=1)), Say(Delta(text="x", token_ids=(1,)))]
    engine.script = lambda _: [*begun, Say(Failed(message="stage 1 died"))]
    last = streamed(gateway)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    missing = gateway.http.post("/v1/messages", json=ASK | {"model": "absent"})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("words", "max_tokens", "sentence"),
    [
        (
            "word " * 40,
            32000,
            "input length and `max_tokens` exceed context limit: {tokens} + 32000 > 256, decrease input length or "
            "`max_tokens` and try again",
        ),
        ("word " * 400, 9, "prompt is too long: {tokens} tokens > 255 maximum"),
        (
            "word " * 4000,
            9,
            "prompt is too long: 1250 tokens > 256 maximum (at least, of 20000 characters)",
        ),
    ],
    ids=["with max_tokens", "alone", "by characters"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_is_refused_in_anthropics_words(
    gateway: RunningGateway,
    engine: ScriptedEngine,
    tmp_path: Path,
    words: str,
    max_tokens: int,
    sentence: str,
    stream: bool,
) -> None:
    write_byte_level(tmp_path, chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    reader = PromptReader.load(tmp_path, vocab_size=260, max_model_len=256, eos_token_ids=[1])

    def read(request: GenerateRequest) -> list[Step]:
        with pytest.raises(PromptError) as refused:
            reader.read(request)
        return [Refuse(400, refused.value.body())]

    engine.script = read
    asked = ASK | {"max_tokens": max_tokens, "stream": stream, "messages": [{"role": "user", "content": words}]}
    answered = gateway.http.post("/v1/messages", json=asked)
    assert (answered.status_code, answered.json()["error"]["type"]) == (400, "invalid_request_error")
    count = len(reader.tokenizer.encode(words, add_special_tokens=False))
    assert answered.json()["error"]["message"] == sentence.format(tokens=count)


def test_advice_about_tools_is_given_in_anthropics_words(
    gateway: RunningGateway, engine: ScriptedEngine, tmp_path: Path
) -> None:
    told = no_tool_format(takes_tools=False)
    refusal = EngineError(code=told.code, message=str(told), param=told.param)
    engine.script = lambda _: [Refuse(400, refusal)]
    message = gateway.http.post("/v1/messages", json=ASK | {"tools": [TOOL]}).json()["error"]["message"]
    assert "tool_choice that requires a call holds" in message
    assert "'required'" not in message
    one_call = {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    schema = {"tools": [TOOL], "output_config": {"format": {"type": "json_schema", "schema": {}}}}
    guided = {"structured_outputs": {"regex": "a"}, "output_config": schema["output_config"]}
    with running_gateway(GatewaySettings(tmp_path / "strict.json", strict_fields=True)) as strict:
        for extra, words in (
            (
                one_call,
                "'tool_choice.disable_parallel_tool_use' can only forbid further calls where one is required by",
            ),
            ({"tools": [TOOL | {"strict": True}]}, "only supported where a call is required by 'tool_choice'"),
            (
                schema,
                "'output_config.format.schema' can't be combined with tools, unless calls are forbidden by 'tool_ch",
            ),
            (guided, "'structured_outputs' can't be combined with 'output_config.format.schema'"),
        ):
            answered = strict.http.post("/v1/messages", json=ASK | extra)
            assert words in answered.json()["error"]["message"]


COUNTED = (200, '{"token_ids": [5, 6, 7], "max_model_len": 99}')


def test_a_prompts_tokens_are_counted_as_a_message_would_read_it(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    """Without `max_tokens`, which only an answer has."""
    engine.replies["POST /v1/tokenize"] = COUNTED
    asked = {name: value for name, value in ASK.items() if name != "max_tokens"} | {"tools": [TOOL]}
    cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answered = gateway.http.post("/v1/messages/count_tokens", json=asked | {"system": cached})
    assert (answered.status_code, answered.json()) == (200, {"input_tokens": 3})
    assert answered.headers["x-stageline-ignored"] == "system.cache_control"
    prompt = json.loads(engine.asked[0][1])["prompt"]
    gateway.http.post("/v1/messages", json=ASK | {"tools": [TOOL], "system": cached})
    # No answer is read, so a template without a place for calls counts too.
    assert prompt == json.loads(engine.requests[0].prompt.to_json()) | {"tools_guided": True}


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b" " * (4 * 1024 * 1024 + 1), 413, "request_too_large"),
        ("POST", "/v1/messages/count_tokens", b"{}", 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", b'{"model": "absent", "messages": [{"role": "user", "content": "x"}]}',
         404, "not_found_error"),
    ],
    ids=lambda value: ascii(value)[:40],
)  # fmt: skip
def test_every_refusal_under_that_path_has_anthropics_form(
    gateway: RunningGateway, method: str, path: str, content: bytes, status: int, kind: str
) -> None:
    answered = gateway.http.request(method, path, content=content, headers={"content-type": "application/json"})
    body = answered.json()
    assert (answered.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), answered.text


def test_a_gateway_that_drains_is_overloaded_to_anthropics_clients(gateway: RunningGateway) -> None:
    gateway.drain()
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = gateway.http.post(path, json=ASK)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        assert "retry-after" in refused.headers


def test_a_key_may_come_as_anthropics_clients_send_it(tmp_path: Path, engine: ScriptedEngine) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - name: one\n    key: a-key-of-sixteen-or-more\n")
    settings = GatewaySettings(tmp_path / "endpoints.json", keys_path=keys)
    with running_gateway(settings) as gateway:
        gateway.http.headers["authorization"] = "Bearer a-key-of-sixteen-or-more"
        gateway.serve(group(engine.url))
        del gateway.http.headers["authorization"]
        engine.script = lambda _: answer("yes")
        good = gateway.http.post("/v1/messages", json=ASK, headers={"x-api-key": "a-key-of-sixteen-or-more"})
        assert good.json()["content"] == [{"type": "text", "text": "yes"}]
        bad = gateway.http.post("/v1/messages", json=ASK, headers={"x-api-key": "another-key-of-sixteen"})
        assert (bad.status_code, bad.json()["error"]["type"]) == (401, "authentication_error")
