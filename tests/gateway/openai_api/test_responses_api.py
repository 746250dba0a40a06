"""`/v1/responses` through the official client: text, tools and streams, and what needs a store refused by name."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import Hold, Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import (
    Admitted,
    ChatPrompt,
    Delta,
    EngineError,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    ToolCallFormat,
)

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": True,
}
ASKED = [{"role": "user", "content": "Rain?"}]
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def prompt_of(engine: ScriptedEngine) -> ChatPrompt:
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def calls_weather(_: Any) -> list[Any]:
    text = 'So: <tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
    pieces = [Say(Delta(text=text[at : at + 7], token_ids=(at,))) for at in range(0, len(text), 7)]
    end = Finished(reason=FinishReason.STOP, prompt_tokens=9, completion_tokens=len(pieces), cached_tokens=4)
    return [Say(Admitted(prompt_tokens=9, tool_call_format=ToolCallFormat.TAGGED)), *pieces, Say(end)]


def test_a_text_is_answered_whole(client: OpenAI, engine: ScriptedEngine) -> None:
    answered = client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", max_output_tokens=9, temperature=0
    )
    assert (answered.status, answered.output_text, answered.error) == ("completed", "Hello world", None)
    assert answered.usage is not None
    assert (answered.usage.input_tokens, answered.usage.output_tokens, answered.usage.total_tokens) == (3, 2, 5)
    assert [(m.role, m.content) for m in prompt_of(engine).messages] == [("system", "Be brief."), ("user", "Hi")]
    assert (engine.requests[0].sampling.max_tokens, engine.requests[0].sampling.temperature) == (9, 0)
    assert answered.id == engine.requests[0].request_id
    openai.types.responses.Response.model_validate(answered.model_dump())


def test_a_stream_has_the_official_events_in_order(client: OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    # Words that come together are one piece.
    assert [kind for kind, _ in itertools.groupby(event.type for event in events)] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.model_dump())
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hello world"


def test_the_clients_own_stream_helper_follows(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = calls_weather
    with client.responses.stream(model=MODEL, input="Rain?", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert final.output_text == "So: "
    called = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in called] == [("weather", {"place": "Oslo"})]
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens == 4


def test_calls_and_their_results_go_back_as_input(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = calls_weather
    turns: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}]
    first = client.responses.create(model=MODEL, input=turns, tools=[WEATHER])
    assert [item.type for item in first.output] == ["message", "function_call"]
    call = first.output[1]
    assert call.type == "function_call"
    turns += first.output
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "wet"})
    engine.script = lambda _: answer("Yes")
    assert client.responses.create(model=MODEL, input=turns, tools=[WEATHER]).output_text == "Yes"
    _, asked, told = prompt_of(engine).messages
    assert (asked.role, asked.content, asked.tool_calls[0].arguments) == ("assistant", "So: ", {"place": "Oslo"})
    assert (told.role, told.tool_call_id, told.content) == ("tool", call.call_id, "wet")


def test_an_answer_can_be_parsed_by_its_schema(client: OpenAI, engine: ScriptedEngine) -> None:
    class Town(BaseModel):
        name: str

    engine.script = lambda _: answer('{"name":', '"Oslo"}')
    parsed = client.responses.parse(model=MODEL, input="Where?", text_format=Town)
    assert parsed.output_parsed == Town(name="Oslo")
    schema = json.loads(engine.requests[0].sampling.json_schema or "")
    assert schema["required"] == ["name"]


def test_a_cut_answer_is_incomplete(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: answer("Hel", reason=FinishReason.LENGTH)
    answered = client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert (answered.status, answered.output_text) == ("incomplete", "Hel")
    assert answered.incomplete_details is not None
    assert answered.incomplete_details.reason == "max_output_tokens"
    assert list(client.responses.create(model=MODEL, input="Hi", stream=True))[-1].type == "response.incomplete"


def test_a_stream_that_breaks_says_so(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [
        Say(Admitted(prompt_tokens=1)),
        Say(Delta(text="par", token_ids=(1,))),
        Say(Failed(message="stage 1 died")),
    ]
    last = list(client.responses.create(model=MODEL, input="Hi", stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "stage 1 died" in last.response.error.message
    assert last.response.output_text == "par"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [WEATHER | {"type": "fucntion"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": {"type": "function", "name": "absent"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"instructions": "Be brief.", "input": [*ASKED, CALL, CALL | {"arguments": []}]}, "input[2].arguments"),
        ({"input": [CALL | {"name": "no name"}, *ASKED]}, "input[0].name"),
        ({"input": [*ASKED, *[CALL] * 129]}, "input[129]"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_what_can_not_be_done_is_refused_by_name(client: OpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**({"model": MODEL, "input": "Hi"} | extra))
    assert refused.value.param == param, refused.value
    assert "messages" not in refused.value.message, "no word of the chat that it is answered as"


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
def test_a_reference_to_a_stored_item_is_refused_as_stored_state(client: OpenAI, item: Any) -> None:
    turns: Any = [*ASKED, item]
    with pytest.raises(openai.BadRequestError, match="item_reference: Responses are not stored here") as refused:
        client.responses.create(model=MODEL, input=turns)
    assert (refused.value.param, refused.value.code) == ("input[1]", "unsupported_parameter")


def test_a_guide_and_a_format_are_named_as_the_client_wrote_them(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_object"}}
    with pytest.raises(openai.BadRequestError, match=r"'structured_outputs' can't be combined with 'text\.format'"):
        client.responses.create(model=MODEL, input="Hi", text=text, extra_body={"structured_outputs": {"regex": "a"}})


def test_what_the_engine_ignored_is_named_as_the_client_wrote_it(
    gateway: RunningGateway, engine: ScriptedEngine
) -> None:
    begin = Say(Admitted(prompt_tokens=3, ignored=("reasoning_effort",)))
    engine.script = lambda _: [begin, *answer("Hi")[1:]]
    asked = {"model": MODEL, "input": "Hi", "reasoning": {"effort": "low"}, "store": True}
    answered = gateway.http.post("/v1/responses", json=asked)
    assert answered.headers["x-stageline-ignored"] == "store,reasoning.effort"


def test_the_engines_refusals_name_the_clients_fields(client: OpenAI, engine: ScriptedEngine) -> None:
    for theirs, ours in (("max_tokens", "max_output_tokens"), (None, "input"), ("response_format", "text.format")):
        refusal = EngineError(code=ErrorCode.INVALID_VALUE, message="too long", param=theirs)
        steps: list[Step] = [Refuse(400, refusal)]
        engine.script = lambda _, steps=steps: steps  # type: ignore[misc]
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input="Hi", max_output_tokens=5)
        assert refused.value.param == ours


def test_what_changes_nothing_is_named_and_nothing_is_stored(client: OpenAI) -> None:
    answered = client.responses.with_raw_response.create(
        model=MODEL, input="Hi", store=True, metadata={"a": "b"}, include=["reasoning.encrypted_content"]
    )
    assert answered.headers["x-stageline-ignored"] == "include,metadata,store"
    response = answered.parse()
    assert response.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError, match="stored"):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize("stream", [False, True])
def test_the_effort_asked_for_stands_in_the_response(gateway: RunningGateway, stream: bool) -> None:
    body = {"model": MODEL, "input": "Hi", "reasoning": {"effort": "low"}, "stream": stream}
    answered = gateway.http.post("/v1/responses", json=body)
    lines = [line.removeprefix("data: ") for line in answered.text.splitlines() if line.startswith("data: ")]
    response = json.loads(lines[0])["response"] if stream else answered.json()
    assert response["reasoning"]["effort"] == "low"


def test_a_client_that_leaves_ends_its_request(client: OpenAI, engine: ScriptedEngine, gateway: RunningGateway) -> None:
    engine.script = lambda _: [Say(Admitted(prompt_tokens=1)), Say(Delta(text="x", token_ids=(1,))), Hold()]
    stream = client.responses.create(model=MODEL, input="Hi", stream=True)
    next(iter(stream))
    stream.close()
    gateway.settle()
    assert gateway.sample("stageline_gateway_body_bytes") == 0
