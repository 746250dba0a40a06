"""The official `openai` client, unchanged, against the gateway."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from processes.gateway_harness import MODEL, RunningGateway, group
from processes.scripted_engine import Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import (
    Admitted,
    ChatPrompt,
    Delta,
    EngineError,
    ErrorCode,
    Failed,
    FinishReason,
    TextPrompt,
    TokenPrompt,
)


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    """A client that does not retry, so that each error is seen."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_a_chat_is_answered_whole(client: OpenAI, engine: ScriptedEngine) -> None:
    answered = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
        ],
        temperature=0,
        max_completion_tokens=9,
        stop="END",
        seed=-1,
    )
    assert answered.choices[0].message.content == "Hello world"
    assert answered.choices[0].message.role == "assistant"
    assert answered.choices[0].finish_reason == "stop"
    assert answered.usage is not None
    assert (answered.usage.prompt_tokens, answered.usage.completion_tokens, answered.usage.total_tokens) == (3, 2, 5)
    assert answered.model == MODEL
    assert answered.system_fingerprint
    assert answered.id == answered._request_id == engine.requests[0].request_id
    asked = engine.requests[0]
    assert isinstance(asked.prompt, ChatPrompt)
    assert [(m.role, m.content) for m in asked.prompt.messages] == [("system", "Be brief."), ("user", "Hi there")]
    assert (asked.sampling.temperature, asked.sampling.max_tokens, asked.sampling.stop) == (0, 9, ("END",))
    assert asked.sampling.seed == 2**63 - 1


def test_a_chat_streams_and_ends_with_usage(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[1:-2]) == "Hello world"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [*[None] * (len(chunks) - 2), "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 5
    assert all(c.usage is None for c in chunks[:-1])
    assert len({(c.id, c.created, c.model, c.system_fingerprint) for c in chunks}) == 1


def test_a_stream_without_options_has_no_usage(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    text = gateway.http.post("/v1/chat/completions", json=body).text
    assert text.endswith("data: [DONE]\n\n")
    assert "usage" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_completion(client: OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = lambda _: answer("a", "", "b", reason=FinishReason.LENGTH)
    answered = client.completions.create(model=MODEL, prompt="Once", stream=stream, max_tokens=3)
    chunks = [answered] if isinstance(answered, openai.types.Completion) else list(answered)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert engine.requests[0].prompt == TextPrompt(text="Once")


def test_token_ids_and_extensions_reach_the_engine(client: OpenAI, engine: ScriptedEngine) -> None:
    client.completions.create(
        model=MODEL, prompt=[5, 6], extra_body={"top_k": 4, "ignore_eos": True, "stop_token_ids": [7]}
    )
    asked = engine.requests[0]
    assert asked.prompt == TokenPrompt(token_ids=(5, 6))
    assert (asked.sampling.top_k, asked.sampling.ignore_eos, asked.sampling.stop_token_ids) == (4, True, (7,))
    assert asked.sampling.max_tokens == 16, "OpenAI's default for completions"


def test_seeds_are_drawn_when_the_client_gives_none(client: OpenAI, engine: ScriptedEngine) -> None:
    for _ in range(3):
        client.completions.create(model=MODEL, prompt="x")
    assert len({request.sampling.seed for request in engine.requests}) == 3


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b\r\n", "naïve 😀", 'data: "x"\n\n'], ids=ascii)
def test_any_text_survives_streaming(client: OpenAI, engine: ScriptedEngine, text: str) -> None:
    engine.script = lambda _: answer(text, text)
    chunks = client.completions.create(model=MODEL, prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text * 2


def test_models_are_listed_with_their_state(client: OpenAI, gateway: RunningGateway, engine: ScriptedEngine) -> None:
    gateway.serve(group(engine.url), group(engine.url, model="org/big", ready=False, message="loading"))
    assert [model.id for model in client.models.list()] == [MODEL, "org/big"]
    big = client.models.retrieve("org/big").model_dump()
    assert big["ready"] is False
    assert "loading" in big["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")


def test_errors_are_the_clients_own_classes(client: OpenAI, gateway: RunningGateway, engine: ScriptedEngine) -> None:
    def ask(model: str = MODEL, **extra: object) -> None:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], extra_body=extra)

    with pytest.raises(openai.NotFoundError) as missing:
        ask("absent")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as many:
        ask(n=0)
    assert many.value.param == "n"
    too_long = EngineError(code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, message="9 tokens; the context holds 8")
    engine.script = lambda _: [Refuse(400, too_long)]
    with pytest.raises(openai.BadRequestError) as long:
        ask()
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    gateway.serve(group(engine.url, ready=False, message="stage 1 is loading"))
    with pytest.raises(openai.InternalServerError, match="stage 1 is loading") as unready:
        ask()
    assert unready.value.status_code == 503
    assert unready.value.response.headers["retry-after"] == "1"


def test_a_stream_that_breaks_raises_in_the_client(client: OpenAI, engine: ScriptedEngine) -> None:
    steps: list[Step] = [
        Say(Admitted(prompt_tokens=1)),
        Say(Delta(text="par", token_ids=(1,))),
        Say(Failed(message="stage 1 died")),
    ]
    engine.script = lambda _: steps
    chunks = client.completions.create(model=MODEL, prompt="x", stream=True)
    assert next(chunks).choices[0].text == "par"
    with pytest.raises(openai.APIError, match="stage 1 died"):
        next(chunks)
