"""Log probabilities of prompts through a gateway, an engine and its stages: Hugging Face's, however the prompt ran."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from oracles.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE
from processes.gateway_harness import MODEL, running_gateway
from processes.running_group import ANSWER_SECONDS, running_group
from stageline_gateway.settings import GatewaySettings
from stageline_runtime.engine.text.tokenizer import EngineTokenizer

PROMPT = [(7 * index) % (VOCAB_SIZE - 3) + 3 for index in range(50)]
"""More than three chunks of the smaller group's steps, and three blocks of cache."""
WORDS = "the end and the inner thing"


@pytest.fixture(
    scope="module",
    params=[(1, 512, 1), (2, 16, 1), pytest.param((2, 16, 2), marks=pytest.mark.thorough)],
    ids=["one stage", "two stages, chunks of 16", "the same of two ranks"],
)
def url(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway before a group of so many stages, with so many tokens a step and so many ranks a stage."""
    num_stages, tokens, ranks = request.param
    directory = tmp_path_factory.mktemp("served")
    options = {"dtype": "float32", "max_num_batched_tokens": tokens, "max_num_seqs": 4, "tensor": ranks}
    with (
        running_group(directory / "group", tiny_llama, num_stages, **options) as served,
        running_gateway(GatewaySettings(endpoints_path=directory / "endpoints.json")) as gateway,
    ):
        gateway.serve(served.endpoint)
        yield gateway.url


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Any:
    """Hugging Face's model."""
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


def expected(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """Log probabilities `[num_tokens, vocab_size]` of the token after each one."""
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([token_ids])).logits[0].double(), dim=-1)


def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/{path}", json={"model": MODEL} | body, timeout=ANSWER_SECONDS, trust_env=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def check_entries(entries: list[Any], token_ids: list[int], rows: torch.Tensor, count: int) -> None:
    """`prompt_logprobs` say of each of `token_ids` but the first what `rows` say."""
    assert len(entries) == len(token_ids)
    assert entries[0] is None
    for entry, token, row in zip(entries[1:], token_ids[1:], rows, strict=False):
        best = row.topk(count).indices.tolist()
        rank = int((row > row[token]).sum()) + 1
        ranks = {str(index): place for place, index in enumerate(best, start=1)} | {str(token): rank}
        assert {index: one["rank"] for index, one in entry.items()} == ranks
        assert next(iter(entry)) == str(token), "the prompt's own stands first"
        for index, one in entry.items():
            assert one["logprob"] == pytest.approx(float(row[int(index)]), abs=1e-3)


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_prompt_logprobs_are_hugging_faces(url: str, reference: Any, cache: str) -> None:
    """The second time the cache holds the prompt, of which nothing is taken; nor does it change the answer."""
    rows = expected(reference, PROMPT)
    if cache == "warm":
        ask(url, "completions", prompt=PROMPT, max_tokens=1)
    answer = ask(url, "completions", prompt=PROMPT, max_tokens=4, temperature=0, prompt_logprobs=3, ignore_eos=True)
    check_entries(answer["choices"][0]["prompt_logprobs"], PROMPT, rows, 3)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    plain = ask(url, "completions", prompt=PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]
    assert "prompt_logprobs" not in plain["choices"][0]
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "others begin with what it has computed"


def test_a_chat_has_its_prompts_once(url: str, reference: Any, tiny_llama: Path) -> None:
    messages = [{"role": "user", "content": WORDS}]
    answer = ask(url, "chat/completions", messages=messages, max_tokens=2, n=2, prompt_logprobs=0)
    rendered = f"<|im_start|>user\n{WORDS}<|im_end|>\n<|im_start|>assistant\n"
    ids = list(EngineTokenizer.load(tiny_llama).encode(rendered, add_special_tokens=False))
    check_entries(answer["prompt_logprobs"], ids, expected(reference, ids), 0)
    assert answer["prompt_logprobs"][1].popitem()[1]["decoded_token"] == "user"[:1]
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


@pytest.mark.parametrize("prompt", [WORDS, PROMPT], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_begins_with_the_prompts_logprobs(
    url: str, reference: Any, tiny_llama: Path, prompt: Any, max_tokens: int
) -> None:
    """As lm-eval asks: what follows the context is added up, and the last one is left out as the answer's."""
    tokenizer = EngineTokenizer.load(tiny_llama)
    ids = prompt if isinstance(prompt, list) else list(tokenizer.encode(prompt, add_special_tokens=True))
    answer = ask(url, "completions", prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=2, echo=True)
    [choice] = answer["choices"]
    rows = expected(reference, ids)
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(ids) + max_tokens
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    own = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
    own += [float(rows[-1].max())] * max_tokens
    assert logprobs["token_logprobs"][1:] == pytest.approx(own, abs=1e-3)
    for top, row in zip(logprobs["top_logprobs"][1:], rows, strict=False):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-3)
    text = tokenizer.decode(tuple(ids), skip_special_tokens=False)
    assert choice["text"].startswith(text)
    if prompt is WORDS:
        offsets = [len(tokenizer.decode(tuple(ids[:at]), skip_special_tokens=False)) for at in range(len(ids))]
        assert logprobs["text_offset"][: len(ids)] == offsets
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


def test_a_stop_token_has_its_logprobs_in_an_echo(url: str) -> None:
    """Otherwise who leaves out the last one would leave out one of the prompt's."""
    bias = {str(EOS_TOKEN_ID): 100}
    asked = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 0, "logit_bias": bias}
    [echoed] = ask(url, "completions", echo=True, **asked)["choices"]
    assert echoed["finish_reason"] == "stop"
    assert len(echoed["logprobs"]["token_logprobs"]) == len(PROMPT) + 1
    [plain] = ask(url, "completions", **asked)["choices"]
    assert plain["logprobs"]["token_logprobs"] == []
