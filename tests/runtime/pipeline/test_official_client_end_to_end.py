"""The official client through a gateway, an engine and two stages: log probabilities, choices, guided JSON."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoModelForCausalLM

from gateway_harness import MODEL, group, running_gateway
from running_group import running_group
from stageline_gateway.settings import GatewaySettings
from stageline_runtime.engine.tokenizer import EngineTokenizer
from tiny_models import VOCAB_SIZE

PROMPT = [5, 9, 100, 42, 7]


@pytest.fixture(scope="module")
def client(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a gateway before a group of two stages."""
    directory = tmp_path_factory.mktemp("served")
    with (
        running_group(directory / "group", tiny_llama, 2, dtype="float32") as served,
        running_gateway(GatewaySettings(endpoints_path=directory / "endpoints.json")) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        gateway.serve(group(served.url))
        yield client


def reference_logprobs(model_dir: Path, token_ids: list[int]) -> torch.Tensor:
    """Hugging Face's log probabilities `[num_tokens, vocab_size]` of the token after each one."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), dim=-1)


def test_logprobs_are_hugging_faces(client: OpenAI, tiny_llama: Path) -> None:
    """Temperature and a penalty change the tokens, but not what is reported of them."""
    answered = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "the end"}],
        max_tokens=12,
        temperature=1.3,
        presence_penalty=1.0,
        seed=4,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answered.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    tokenizer = EngineTokenizer.load(tiny_llama)
    id_of = {tokenizer.token_bytes.of(index): index for index in range(VOCAB_SIZE)}
    rendered = "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n"
    prompt = list(tokenizer.encode(rendered, add_special_tokens=False))
    output = [id_of[bytes(one.bytes or ())] for one in logprobs.content]
    expected = reference_logprobs(tiny_llama, prompt + output)[len(prompt) - 1 :]
    for one, token, row in zip(logprobs.content, output, expected[:-1], strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [top.logprob for top in one.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        assert [id_of[bytes(top.bytes or ())] for top in one.top_logprobs] == row.topk(3).indices.tolist()


def test_choices_differ_and_repeat_with_their_seed(client: OpenAI) -> None:
    def ask(seed: int, n: int) -> list[str]:
        answered = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=10, n=n, seed=seed, extra_body={"ignore_eos": True}
        )
        assert answered.usage is not None
        assert (answered.usage.prompt_tokens, answered.usage.completion_tokens) == (len(PROMPT), 10 * n)
        return [choice.text for choice in answered.choices]

    three = ask(1, 3)
    assert len(set(three)) == 3
    assert ask(1, 3) == three
    assert ask(1, 1) == three[:1], "the first choice doesn't depend on how many there are"
    assert ask(2, 3) != three


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["colour", "counts"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_answers_satisfy_their_schema(client: OpenAI, temperature: float) -> None:
    """Random weights would say anything; several at once, beside answers that no grammar holds."""

    def ask(seed: int) -> list[str]:
        answered = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Which?"}],
            temperature=temperature,
            seed=seed,
            n=2,
            max_tokens=450,
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        )
        assert {choice.finish_reason for choice in answered.choices} == {"stop"}
        return [choice.message.content or "" for choice in answered.choices]

    def ask_freely(seed: int) -> list[str]:
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, seed=seed)
        return []

    with ThreadPoolExecutor(max_workers=6) as pool:
        answers = [text for texts in pool.map(lambda i: ask_freely(i) if i % 2 else ask(i), range(6)) for text in texts]
    assert len(answers) == 6
    for text in answers:
        answer = json.loads(text)
        assert answer.keys() == {"colour", "counts"}, text
        assert answer["colour"] in ("red", "green")
        assert len(answer["counts"]) <= 2
        assert all(type(count) is int and 0 <= count <= 99 for count in answer["counts"])


def test_json_object_is_an_object(client: OpenAI) -> None:
    answered = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Anything."}],
        temperature=0,
        max_tokens=1,
        response_format={"type": "json_object"},
        logit_bias={"93": 10},
    )
    assert (answered.choices[0].message.content or "").strip(" \n\r\t") in ("{", "")


def test_a_bad_schema_is_the_clients_fault(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="strin") as refused:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}},
        )
    assert refused.value.param == "response_format"
