"""Several prompts in one `/v1/completions`, and prompts repeated before their answers (`echo`)."""

from collections import defaultdict
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from processes.gateway_harness import MODEL, RunningGateway
from processes.scripted_engine import Refuse, ScriptedEngine, Step, answer
from stageline_api.engine_http import EngineError, ErrorCode, GenerateRequest, TextPrompt, TokenPrompt

PROMPTS = ["one ", "two two ", "three "]


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def told(request: GenerateRequest) -> list[Step]:
    """An answer that tells its prompt and choice, and counts a prompt's words as its tokens."""
    assert isinstance(request.prompt, TextPrompt)
    text = request.prompt.text
    return answer(f"<{text}", f"{request.sampling.choice}>", prompt_tokens=len(text.split()))


EXPECTED = [f"<{prompt}{choice}>" for prompt in PROMPTS for choice in range(2)]


def test_answers_come_in_the_order_of_prompts_and_choices(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = told
    answered = client.completions.create(model=MODEL, prompt=PROMPTS, n=2, seed=5)
    assert [(choice.index, choice.text) for choice in answered.choices] == list(enumerate(EXPECTED))
    assert answered.usage is not None
    assert (answered.usage.prompt_tokens, answered.usage.completion_tokens) == (4, 12), "each prompt counts once"
    assert {request.sampling.seed for request in engine.requests} == {5}
    assert len({request.request_id for request in engine.requests}) == 6


def test_a_stream_has_all_of_them(client: OpenAI, engine: ScriptedEngine) -> None:
    engine.script = told
    texts: dict[int, str] = defaultdict(str)
    usage = None
    stream = client.completions.create(
        model=MODEL, prompt=PROMPTS, n=2, echo=True, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[index] for index in range(6)] == [PROMPTS[i // 2] + text for i, text in enumerate(EXPECTED)]
    assert usage is not None
    assert usage.prompt_tokens == 4


def test_several_lists_of_token_ids(client: OpenAI, engine: ScriptedEngine) -> None:
    answered = client.completions.create(model=MODEL, prompt=[[5, 6], [7]])
    assert [choice.text for choice in answered.choices] == ["Hello world"] * 2
    asked = {request.request_id[-1]: request.prompt for request in engine.requests}
    assert asked == {"0": TokenPrompt(token_ids=(5, 6)), "1": TokenPrompt(token_ids=(7,))}


def test_echo_repeats_the_prompt_as_it_came(client: OpenAI) -> None:
    answered = client.completions.create(model=MODEL, prompt="Say  ", echo=True)
    assert answered.choices[0].text == "Say  Hello world"


def test_a_prompt_that_is_refused_refuses_all(client: OpenAI, engine: ScriptedEngine) -> None:
    refusal = EngineError(code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, message="too long")
    long = TextPrompt(text="two two ")
    engine.script = lambda request: [Refuse(400, refusal)] if request.prompt == long else told(request)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=PROMPTS)
    assert refused.value.param == "prompt"


def test_every_prompt_counts_in_the_metrics(client: OpenAI, gateway: RunningGateway, engine: ScriptedEngine) -> None:
    engine.script = told
    before = gateway.sample("stageline_prompt_tokens_total", model_name=MODEL)
    client.completions.create(model=MODEL, prompt=PROMPTS, n=2)
    gateway.settle()
    assert gateway.sample("stageline_prompt_tokens_total", model_name=MODEL) == before + 4
