"""Answers that a real group continues from every token on: text, ids, log probabilities and usage as undisturbed."""

import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from oracles.pipeline_checks import draw_prompts
from oracles.tiny_models import VOCAB_SIZE
from processes.running_group import RunningGroup, running_group
from stageline_api.engine_http import GenerateRequest, SamplingParams, TokenPrompt

LETTERS = dict.fromkeys(range(3 + 64, 3 + 90), 6.0)
"""Ids of letters: what is generated is then mostly text, with broken bytes now and then."""
LENGTH = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "top_logprobs": 2},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.6, "logit_bias": LETTERS},
    "seeded": {"temperature": 1.1, "seed": 5, "frequency_penalty": 0.9, "presence_penalty": 0.4, "top_logprobs": 0},
    "nucleus": {"temperature": 1.3, "seed": 6, "choice": 1, "top_p": 0.8, "top_k": 50, "logit_bias": LETTERS},
    "exclusions": {
        "temperature": 1.0,
        "seed": 8,
        "allowed_token_ids": tuple(range(3 + 64, 3 + 90)),
        "bad_words": ("AB", "CC", "K"),
        "stop_token_ids": (70, 71, 72),
        "min_tokens": 20,
        "ignore_eos": False,
    },
    "schema": {
        "temperature": 1.2,
        "seed": 7,
        "json_schema": '{"type":"array","items":{"type":"integer","maximum":99},"maxItems":4}',
        "ignore_eos": False,
        "repetition_penalty": 1.2,
        "max_tokens": 60,
    },
}


@pytest.fixture(scope="module")
def group(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two stages; chunks of 16 tokens, so that a border between prompt and output falls into chunks of all kinds."""
    config: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 16}
    with running_group(tmp_path_factory.mktemp("group"), tiny_llama, 2, **config) as running:
        yield running


def stream(
    group: RunningGroup, prompt: tuple[int, ...], sampling: SamplingParams, **fields: Any
) -> list[dict[str, Any]]:
    request = GenerateRequest(
        request_id=secrets.token_hex(8), prompt=TokenPrompt(token_ids=prompt), sampling=sampling, **fields
    )
    with (
        httpx.Client(timeout=120.0) as client,
        client.stream("POST", f"{group.url}/v1/generate", content=request.to_json()) as response,
    ):
        assert response.status_code == 200, response.read().decode()
        return [json.loads(line) for line in response.iter_lines() if line]


def joined(events: list[dict[str, Any]]) -> tuple[str, list[int], list[dict[str, Any]]]:
    """Text, ids and log probabilities of some deltas."""
    deltas = [event for event in events if event["type"] == "delta"]
    text = "".join(delta["text"] for delta in deltas)
    return text, [i for delta in deltas for i in delta["token_ids"]], [p for d in deltas for p in d.get("logprobs", ())]


def with_stop_string(group: RunningGroup, prompt: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The same options, and a stop string of several tokens that the answer comes to say."""
    text, _, _ = joined(stream(group, prompt, SamplingParams(**options)))
    middle = len(text) * 2 // 3
    return options | {"stop": (text[middle - 3 : middle + 3], "never said")}


def check_every_cut(group: RunningGroup, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
    whole = stream(group, prompt, sampling)
    text, ids, logprobs = joined(whole)
    assert whole[-1]["type"] == "finished", whole[-1]
    borders = [end for end in range(len(whole)) if all(event["type"] != "finished" for event in whole[:end])]
    assert len(borders) > 5, f"the stream came in too few pieces to be cut: {whole}"

    def check(end: int) -> None:
        seen_text, seen_ids, seen_logprobs = joined(whole[:end])
        given = {"generated_token_ids": tuple(seen_ids), "generated_characters": len(seen_text) if seen_ids else None}
        rest = stream(group, prompt, sampling, **given)
        new_text, new_ids, new_logprobs = joined(rest)
        assert seen_ids + new_ids == ids, (end, sampling)
        assert seen_text + new_text == text, (end, sampling)
        # Where the beginning was found in the cache is no part of what was said.
        assert rest[-1] | {"cached_tokens": 0} == whole[-1] | {"cached_tokens": 0}, (end, sampling)
        found = [*seen_logprobs, *new_logprobs]
        assert [one["token_id"] for one in found] == [one["token_id"] for one in logprobs]
        for one, other in zip(found, logprobs, strict=True):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert [top["token_id"] for top in one["top_logprobs"]] == [t["token_id"] for t in other["top_logprobs"]]

    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(check, borders))


@pytest.mark.parametrize("name", OPTIONS)
def test_continued_after_every_delta(group: RunningGroup, name: str) -> None:
    prompt = draw_prompts(4, VOCAB_SIZE, 40)[3] * 3
    options = {"max_tokens": LENGTH, "ignore_eos": True} | OPTIONS[name]
    check_every_cut(group, prompt, SamplingParams(**options))


def test_a_stop_string_straddles_the_border(group: RunningGroup) -> None:
    prompt = draw_prompts(1, VOCAB_SIZE, 40, seed=3)[0]
    options = with_stop_string(group, prompt, {"max_tokens": LENGTH, "ignore_eos": True} | OPTIONS["nucleus"])
    sampling = SamplingParams(**options)
    finished = stream(group, prompt, sampling)[-1]
    assert finished["reason"] == "stop"
    assert finished["completion_tokens"] < LENGTH
    check_every_cut(group, prompt, sampling)


def test_output_that_breaks_its_schema_fails_with_a_sentence(group: RunningGroup) -> None:
    sampling = SamplingParams(max_tokens=8, json_schema='{"type":"integer"}')
    *_, last = stream(group, (5, 6), sampling, generated_token_ids=(3 + 65,))
    assert last["type"] == "failed"
    assert "token 68 is not admitted" in last["message"]
