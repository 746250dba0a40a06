"""Log probabilities of prompts, as vLLM's and OpenAI's forms have them, over scripted engines."""

import json
from pathlib import Path
from typing import Any

import pytest

from processes.gateway_harness import MODEL, RunningGateway, group, running_gateway
from processes.scripted_engine import Drop, Say, ScriptedEngine, Step
from stageline_api.engine_http import (
    Admitted,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptToken,
    PromptTokens,
    TokenLogprob,
    TopLogprob,
)
from stageline_gateway.settings import GatewaySettings


def likely(content: bytes, token_id: int, value: float) -> TopLogprob:
    return TopLogprob(token_id=token_id, bytes=tuple(content), logprob=value)


PROMPT = (
    PromptToken(token_id=1, bytes=tuple(b"<s>")),
    PromptToken(
        token_id=5, bytes=tuple(b" Hi"), logprob=-2.5, rank=4,
        top_logprobs=(likely(b"Oh", 6, -0.5), likely(b"So", 7, -1.5)),
    ),
    PromptToken(
        token_id=8, bytes=tuple(b" you"), logprob=-0.25, rank=1,
        top_logprobs=(likely(b" you", 8, -0.25), likely(b" all", 9, -3.0)),
    ),
)  # fmt: skip
"""Of "Hi you", after a token that the tokenizer puts first."""
ANSWER = Delta(
    text="!", token_ids=(3,), logprobs=(TokenLogprob(token_id=3, bytes=(33,), logprob=-0.75, top_logprobs=()),)
)
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": MODEL, "prompt": "Hi you"}


def told(request: GenerateRequest, *ending: Step, of: int = len(PROMPT)) -> list[Step]:
    """The prompt's tokens up to `of`, but for those that were told, one event each; then `ending` or the answer."""
    first = request.sampling.prompt_told
    pieces = [] if first is None else [Say(PromptTokens(tokens=(one,))) for one in PROMPT[first:of]]
    says_more = not request.sampling.prompt_only
    end = Finished(reason=FinishReason.LENGTH, prompt_tokens=3, completion_tokens=int(says_more))
    rest: list[Step] = [*([Say(ANSWER)] if says_more else []), Say(end)]
    return [Say(Admitted(prompt_tokens=3)), *pieces, *(ending or rest)]


ENTRIES = [
    None,
    {
        "5": {"logprob": -2.5, "rank": 4, "decoded_token": " Hi"},
        "6": {"logprob": -0.5, "rank": 1, "decoded_token": "Oh"},
    },
    {"8": {"logprob": -0.25, "rank": 1, "decoded_token": " you"}},
]
"""With one alternative each."""


def ask(gateway: RunningGateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answered = gateway.http.post(path, json=body)
    assert answered.status_code == 200, answered.text
    return dict(answered.json())


def test_a_chat_tells_them_beside_its_choices_and_asks_once(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = told
    answer = ask(gateway, "/v1/chat/completions", CHAT | {"prompt_logprobs": 1, "n": 2})
    assert answer["prompt_logprobs"] == ENTRIES
    assert [set(choice) for choice in answer["choices"]] == [{"index", "logprobs", "finish_reason", "message"}] * 2
    asked = {(request.sampling.choice, request.sampling.prompt_logprobs) for request in engine.requests}
    assert asked == {(0, 1), (1, None)}


def test_a_completion_tells_them_with_each_choice(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    """A count of its own beside that of an echo: the engine is asked for the larger one."""
    engine.script = told
    answer = ask(gateway, "/v1/completions", TEXT | {"prompt_logprobs": 1, "echo": True, "logprobs": 2, "n": 2})
    assert {request.sampling.prompt_logprobs for request in engine.requests} == {2}
    for choice in answer["choices"]:
        assert choice["prompt_logprobs"] == ENTRIES
        assert choice["text"] == "Hi you!"
        assert choice["logprobs"] == {
            "tokens": ["<s>", "Hi", " you", "!"],
            "token_logprobs": [None, -2.5, -0.25, -0.75],
            "top_logprobs": [
                None,
                {"Oh": -0.5, "So": -1.5, "Hi": -2.5},
                {" you": -0.25, " all": -3.0},
                {"!": -0.75},
            ],
            "text_offset": [0, 0, 2, 6],
        }


def test_nothing_is_told_to_who_did_not_ask(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = told
    answer = ask(gateway, "/v1/completions", TEXT | {"echo": True})
    assert "prompt_logprobs" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None
    [request] = engine.requests
    assert (request.sampling.prompt_logprobs, request.sampling.prompt_told) == (None, None)
    assert request.sampling.lists_stop_token is None


@pytest.mark.parametrize("prompt", ["Hi you", [1, 5, 8]], ids=["text", "ids"])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_an_echo_alone_has_no_answer(
    gateway: RunningGateway, engine: ScriptedEngine, prompt: Any, logprobs: int | None
) -> None:
    """`max_tokens` 0: the engine is told that nothing more is wanted. What a prompt of ids says, its tokens tell."""
    engine.script = told
    body = {"model": MODEL, "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = ask(gateway, "/v1/completions", body)
    [choice] = answer["choices"]
    assert choice["text"] == ("Hi you" if isinstance(prompt, str) else "<s> Hi you")
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    assert (choice["logprobs"] or {}).get("token_logprobs") == (None if logprobs is None else [None, -2.5, -0.25])
    [request] = engine.requests
    assert (request.sampling.max_tokens, request.sampling.prompt_only) == (1, True)


@pytest.mark.parametrize("prompt", ["Hi you", [1, 5, 8]], ids=["text", "ids"])
def test_a_streamed_echo_says_the_prompt_first(gateway: RunningGateway, engine: ScriptedEngine, prompt: Any) -> None:
    engine.script = told
    body = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 0, "stream": True}
    lines = gateway.http.post("/v1/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == ("Hi you!" if isinstance(prompt, str) else "<s> Hi you!")
    told_of = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [value for one in told_of for value in one["token_logprobs"]] == [None, -2.5, -0.25, -0.75]


@pytest.mark.parametrize("of", [1, 2, 3])
def test_the_next_engine_tells_only_what_was_not_told(
    gateway: RunningGateway, engine: ScriptedEngine, other_engine: ScriptedEngine, of: int
) -> None:
    engine.script = lambda request: told(request, Drop(), of=of)
    other_engine.script = told
    gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
    answer = ask(gateway, "/v1/completions", TEXT | {"prompt_logprobs": 1, "max_tokens": 2})
    assert answer["choices"][0]["prompt_logprobs"] == ENTRIES
    asked = [request.sampling.prompt_told for request in (*engine.requests, *other_engine.requests)]
    assert asked == [0, of]


def test_an_answer_that_outgrows_the_room_is_refused(tmp_path: Path, engine: ScriptedEngine) -> None:
    top = tuple(likely(b" word", index, -1.0) for index in range(20))
    one = PromptToken(token_id=5, bytes=(32,), logprob=-1.0, rank=1, top_logprobs=top)
    piece = Say(PromptTokens(tokens=(one,) * 64))
    engine.script = lambda _: [Say(Admitted(prompt_tokens=64 * 40)), *([piece] * 40), Say(ANSWER)]
    settings = GatewaySettings(tmp_path / "endpoints.json", body_room_bytes=1_000_000)
    with running_gateway(settings) as gateway:
        gateway.serve(group(engine.url))
        answered = gateway.http.post("/v1/completions", json=TEXT | {"prompt_logprobs": 20})
        assert (answered.status_code, answered.json()["error"]["code"]) == (503, "body_room")
        held = gateway.admin.get("/status").json()["bodies"]
        assert held["most_bytes"] <= 1_000_000
        assert held["bytes"] == 0
