"""`n` and log probabilities through the official client, against a scripted engine."""

from collections import defaultdict
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from processes.gateway_harness import MODEL, RunningGateway, eventually
from processes.scripted_engine import Drop, Hold, Refuse, Say, ScriptedEngine, Step, answer
from stageline_api.engine_http import (
    Admitted,
    ContextExceeded,
    Delta,
    EngineError,
    ErrorCode,
    Finished,
    FinishReason,
    GenerateRequest,
    TokenLogprob,
    TopLogprob,
)


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    """A client that does not retry, so that each error is seen."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def by_choice(request: GenerateRequest) -> list[Step]:
    """As many tokens as the choice's number and one more."""
    return answer(*(f"{request.sampling.choice}." for _ in range(request.sampling.choice + 1)))


def logprob(content: bytes, value: float, *others: tuple[bytes, float]) -> TokenLogprob:
    top = tuple(TopLogprob(token_id=9, bytes=tuple(other), logprob=worth) for other, worth in others)
    return TokenLogprob(token_id=1, bytes=tuple(content), logprob=value, top_logprobs=top)


E_ACUTE = (
    Delta(text="a", token_ids=(1,), logprobs=(logprob(b"a", -0.5, (b"a", -0.5), (b"b", -1.0)),)),
    Delta(text="", token_ids=(2,), logprobs=(logprob(b"\xc3", -0.25, (b"\xc3", -0.25), (b" ", -3.0)),)),
    Delta(text="\u00e9", token_ids=(3,), logprobs=(logprob(b"\xa9", -0.125, (b"\xa9", -0.125), (b"c", -9999.0)),)),
)


def e_acute(_request: GenerateRequest) -> list[Step]:
    end = Finished(reason=FinishReason.LENGTH, prompt_tokens=3, completion_tokens=3)
    return [Say(Admitted(prompt_tokens=3)), *(Say(delta) for delta in E_ACUTE), Say(end)]


def test_choices_have_their_index_their_noise_and_one_prompt(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = by_choice
    answered = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=3)
    assert [choice.index for choice in answered.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answered.choices] == ["0.", "1.1.", "2.2.2."]
    assert answered.usage is not None
    assert (answered.usage.prompt_tokens, answered.usage.completion_tokens) == (3, 6)
    assert sorted(request.sampling.choice for request in engine.requests) == [0, 1, 2]
    assert len({request.sampling.seed for request in engine.requests}) == 1
    assert {request.request_id for request in engine.requests} == {f"{answered.id}-{choice}" for choice in range(3)}


def test_streamed_choices_are_told_apart(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = by_choice
    texts: dict[int, str] = defaultdict(str)
    ends: list[int] = []
    usages = []
    stream = client.completions.create(
        model=MODEL, prompt="Hi", n=4, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            assert choice.index not in ends, "nothing follows a choice's end"
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert texts == {0: "0.", 1: "1.1.", 2: "2.2.2.", 3: "3.3.3.3."}
    assert sorted(ends) == [0, 1, 2, 3]
    [counts] = usages
    assert (counts.prompt_tokens, counts.completion_tokens) == (3, 10)


def test_one_refused_choice_refuses_the_request(client: OpenAI, engine: ScriptedEngine) -> None:
    error = EngineError(code=ErrorCode.INVALID_VALUE, message="No.", param="seed")
    engine.script = lambda request: (
        [Refuse(400, error)] if request.sampling.choice == 2 else [Say(Admitted(prompt_tokens=3)), Hold()]
    )
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="Hi", n=3, stream=True)
    assert refused.value.param == "seed"
    all_but_one_are_left(engine)


def test_one_lost_choice_ends_all(client: OpenAI, engine: ScriptedEngine) -> None:
    says = Say(Delta(text="x", token_ids=(1,)))
    engine.script = lambda request: [
        Say(Admitted(prompt_tokens=3)), says, Drop() if request.sampling.choice else Hold()
    ]  # fmt: skip
    with pytest.raises(openai.APIError, match="broke"):
        for _ in client.completions.create(model=MODEL, prompt="Hi", n=2, stream=True):
            pass
    all_but_one_are_left(engine)


def all_but_one_are_left(engine: ScriptedEngine) -> None:
    """Wait until the other choices run no more; one that had not got to the engine yet never does."""
    asked, left = engine.requests, engine.left_early
    eventually(lambda: len(left) == len(asked) - 1, lambda: f"of {len(asked)} choices these were left: {left}")


def test_chat_logprobs(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = e_acute
    answered = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )
    assert engine.requests[0].sampling.top_logprobs == 2
    logprobs = answered.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.bytes, one.logprob) for one in logprobs.content] == [
        ("a", [97], -0.5),
        ("\ufffd", [0xC3], -0.25),
        ("\ufffd", [0xA9], -0.125),
    ]
    assert [(one.token, one.logprob) for one in logprobs.content[0].top_logprobs] == [("a", -0.5), ("b", -1.0)]


def test_streamed_chat_logprobs_come_with_or_before_their_text(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = e_acute
    chunks = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, stream=True
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert engine.requests[0].sampling.top_logprobs == 0
    assert "".join(choice.delta.content or "" for choice in choices) == "a\u00e9"
    reported = [one for choice in choices if choice.logprobs for one in choice.logprobs.content or []]
    assert b"".join(bytes(one.bytes or ()) for one in reported).decode() == "a\u00e9"


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(client: OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    engine.script = e_acute
    if stream:
        chunks = list(client.completions.create(model=MODEL, prompt="Hi", logprobs=1, stream=True))
        found = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    else:
        choice = client.completions.create(model=MODEL, prompt="Hi", logprobs=1).choices[0]
        assert choice.logprobs is not None
        found = [choice.logprobs]
    assert engine.requests[0].sampling.top_logprobs == 1
    assert [token for one in found for token in one.tokens or []] == ["a", r"bytes:\xc3", r"bytes:\xa9"]
    assert [value for one in found for value in one.token_logprobs or []] == [-0.5, -0.25, -0.125]
    assert [offset for one in found for offset in one.text_offset or []] == [0, 1, 1]
    tops = [top for one in found for top in one.top_logprobs or []]
    assert tops[0] == {"a": -0.5, "b": -1.0}


def test_nothing_is_reported_to_who_did_not_ask(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = e_acute
    assert client.completions.create(model=MODEL, prompt="Hi").choices[0].logprobs is None
    assert engine.requests[0].sampling.top_logprobs is None


def test_a_limit_is_named_as_the_client_wrote_it(client: OpenAI, engine: ScriptedEngine) -> None:
    message = "max_tokens is 600, lower max_tokens to 5."
    exceeded = ContextExceeded(limit_tokens=25, prompt_tokens=20, max_tokens=600)
    error = EngineError(code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, message=message, param="max_tokens", exceeded=exceeded)
    engine.script = lambda _: [Refuse(400, error)]
    with pytest.raises(openai.BadRequestError) as newer:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=600
        )
    assert newer.value.param == "max_completion_tokens"
    assert "'max_completion_tokens' = 600 and a prompt of 20 tokens" in newer.value.message
    assert "lower it to 5" in newer.value.message
    with pytest.raises(openai.BadRequestError) as older:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=600)
    assert older.value.param == "max_tokens"
