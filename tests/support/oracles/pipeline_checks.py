"""What end-to-end tests of the pipeline compare: prompts of many lengths, Hugging Face's tokens, state seconds."""

import json
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from processes.running_group import RunningGroup, page
from stageline_api import ports
from stageline_api.engine_http import GenerateRequest, SamplingParams, TokenPrompt

Prompt = tuple[int, ...]


def draw_prompts(count: int, vocab_size: int, longest: int, *, seed: int = 11) -> list[Prompt]:
    """Random prompts: one token, lengths around powers of two, `longest`, and lengths between."""
    chooser = random.Random(seed)
    lengths = [1, 2, 3, 7, 8, 9, 31, 32, 33, longest][:count]
    lengths += [chooser.randint(1, longest) for _ in range(count - len(lengths))]
    return [tuple(chooser.randrange(3, vocab_size) for _ in range(min(length, longest))) for length in lengths]


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy for exactly `max_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def hugging_face_tokens(model_dir: Path, prompts: list[Prompt], max_tokens: list[int]) -> list[list[int]]:
    """Hugging Face's greedy continuation in float32 of each prompt alone, end-of-sequence ignored."""
    import torch
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt, length in zip(prompts, max_tokens, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    torch.set_num_threads(threads)
    return outputs


class OpenStream:
    """One generation under way, read event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = filter(None, response.iter_lines())  # a blank line says that it is queued
        self.response = response

    def next_event(self) -> dict[str, Any]:
        """The next event of the stream; fails when it ended without one."""
        line = next(self._lines, None)
        assert line is not None, "the stream ended without a last event"
        return dict(json.loads(line))

    def rest(self) -> list[dict[str, Any]]:
        """All events up to the end."""
        return [json.loads(line) for line in self._lines]


@contextmanager
def open_stream(group: RunningGroup, prompt: Prompt, sampling: SamplingParams, **fields: Any) -> Iterator[OpenStream]:
    """Start a generation; leaving closes its connection."""
    request = GenerateRequest(
        request_id=secrets.token_hex(8), prompt=TokenPrompt(token_ids=prompt), sampling=sampling, **fields
    ).to_json()
    with (
        httpx.Client(timeout=60.0) as client,
        client.stream("POST", f"{group.url}/v1/generate", content=request) as response,
    ):
        assert response.status_code == 200, response.read().decode()
        yield OpenStream(response)


def samples(url: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Every sample of an exposition: values by series name and label values (model name and stage left out)."""
    text = page(url).text
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(value for name, value in sample.labels.items() if name not in ("model_name", "stage"))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def stage_samples(group: RunningGroup, stage: int) -> dict[str, dict[tuple[str, ...], float]]:
    """The exposition of one stage."""
    return samples(f"http://{group.addresses[stage]}:{ports.STAGE_HEALTH}/metrics")


def wait_all_counted(group: RunningGroup) -> None:
    """Until no request is left and each stage has counted every plan: it does so when its result is sent already."""
    group.wait_until(lambda: group.engine_status().get("requests_running") == 0, "the end of all requests")
    # The warm-up counts on the stages alone; heartbeats compute nothing and count nowhere.
    expected = samples(f"{group.url}/metrics")["stageline_engine_plans_total"][()] + 1
    for stage in range(len(group.addresses)):
        group.wait_until(
            lambda stage=stage: sum(stage_samples(group, stage)["stageline_stage_steps_total"].values()) == expected,  # type: ignore[misc]
            f"{expected:g} plans counted on stage {stage}",
        )
