"""The official client through a gateway, an engine and two stages: log probabilities, choices, guided JSON."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoModelForCausalLM

from oracles.pipeline_checks import samples
from oracles.tiny_models import VOCAB_SIZE
from processes.gateway_harness import MODEL, eventually, running_gateway
from processes.running_group import page, running_group
from stageline_api.endpoints import GroupEndpoint
from stageline_api.health import EngineStatus
from stageline_gateway.settings import GatewaySettings
from stageline_runtime.engine.text.tokenizer import EngineTokenizer

PROMPT = [5, 9, 100, 42, 7]
SLOW_STAGE = ("-m", "stageline_bench.runtime.group.paced_stage", "0.2", "0")
"""400 tokens of two of them take more than two minutes, so that no answer ends before its client has left."""


@pytest.fixture(scope="module")
def endpoint(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupEndpoint]:
    """A group of two stages."""
    with running_group(tmp_path_factory.mktemp("group"), tiny_llama, 2, dtype="float32") as served:
        yield served.endpoint


@pytest.fixture(scope="module")
def client(endpoint: GroupEndpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a gateway before that group."""
    directory = tmp_path_factory.mktemp("served")
    with (
        running_gateway(GatewaySettings(endpoints_path=directory / "endpoints.json")) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        gateway.serve(endpoint)
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


def test_answers_match_their_expression_or_are_a_choice(client: OpenAI) -> None:
    def ask(guide: dict[str, Any], seed: int) -> str:
        answered = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Which?"}],
            seed=seed,
            temperature=1.5,
            extra_body={"structured_outputs": guide},
        )
        assert answered.choices[0].finish_reason == "stop"
        return answered.choices[0].message.content or ""

    choices = ["red", "green (light)", "a|b"]
    found = {ask({"choice": choices}, seed) for seed in range(4)}
    assert found <= set(choices)
    assert re.fullmatch(r"\d{3}-[a-f]{2}", found_number := ask({"regex": r"\d{3}-[a-f]{2}"}, 1)), found_number
    with pytest.raises(BadRequestError, match="regular expression") as refused:
        ask({"regex": "(ab"}, 1)
    assert refused.value.param == "structured_outputs"


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


PLACE: Any = {
    "type": "function",
    "function": {
        "name": "place",
        "parameters": {
            "properties": {"kind": {"$ref": "#/$defs/Kind"}},
            "required": ["kind"],
            "additionalProperties": False,
            "$defs": {"Kind": {"enum": ["town", "lake"]}},
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "place"}}], ids=str)
def test_forced_calls_keep_to_their_tools_schema(client: OpenAI, choice: Any) -> None:
    """A model of random weights, whose template knows no tools, still calls what it must."""
    answered = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        tools=[PLACE],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=200,
        seed=3,
    )
    [call] = answered.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, answered.choices[0].finish_reason) == ("place", "tool_calls")
    assert json.loads(call.function.arguments)["kind"] in {"town", "lake"}


def test_a_client_that_leaves_ends_its_request_in_the_stages(tiny_llama: Path, tmp_path: Path) -> None:
    """With a stage that stands still it can't end in any other way."""

    def status() -> EngineStatus:
        return EngineStatus.model_validate_json(page(f"{served.url}/status").content)

    with (
        running_group(tmp_path / "group", tiny_llama, 2, stage_command=SLOW_STAGE) as served,
        running_gateway(GatewaySettings(endpoints_path=tmp_path / "endpoints.json")) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=60) as client,
    ):
        gateway.serve(served.endpoint)
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with served.standing_still("stage-1"):
            assert status().requests_running == 1, served.account()
            stream.close()
            eventually(lambda: status().requests_running == 0, lambda: f"{status()}\n{served.account()}")
        assert 0 < status().generation_tokens_total < 400
        held = samples(f"{served.url}/metrics")["stageline_kv_cache_usage_ratio"]
        assert set(held.values()) == {0.0}, "its cache was not freed"
