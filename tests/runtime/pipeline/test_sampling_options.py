"""Sampling options through real groups: Hugging Face's penalised tokens, and the same tokens at any stage count."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oracles.pipeline_checks import draw_prompts
from oracles.tiny_models import VOCAB_SIZE
from processes.running_group import running_group
from stageline_api.engine_http import SamplingParams

PENALTY = 1.7
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": PENALTY},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 1.0, "repetition_penalty": 0.8, "logit_bias": {17: 4.0, 40: -100.0}},
    {"temperature": 1.5},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "frequency_penalty": 0.7, "choice": 2},
    {"temperature": 1.2, "min_tokens": 20, "ignore_eos": False, "stop_token_ids": tuple(range(3, 67))},
    {"temperature": 0.0, "bad_words": ("q", "AB"), "allowed_token_ids": tuple(range(3, 67))},
    {"temperature": 1.3, "json_schema": '{"type":"integer"}', "ignore_eos": False, "repetition_penalty": 1.2},
]


def penalised_tokens(model_dir: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Hugging Face's greedy tokens under a repetition penalty."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        repetition_penalty=PENALTY,
        pad_token_id=0,
    )
    return list(generated[0, len(prompt) :].tolist())


@pytest.mark.thorough
def test_options_mean_the_same_at_any_stage_count(tiny_llama: Path, tmp_path: Path) -> None:
    """Prompts longer than a step, more requests than slots: history survives chunks and slot reuse."""
    prompts = draw_prompts(12, VOCAB_SIZE, 70)
    samplings = [
        SamplingParams(**({"seed": index, "max_tokens": 20, "ignore_eos": True} | OPTIONS[index % len(OPTIONS)]))
        for index in range(len(prompts))
    ]
    outputs = []
    for stage_count in (1, 2):
        with running_group(
            tmp_path / str(stage_count),
            tiny_llama,
            stage_count,
            dtype="float32",
            max_num_seqs=4,
            max_num_batched_tokens=48,
        ) as group:
            outputs.append(group.generate_all(prompts, samplings))
    assert outputs[0] == outputs[1]
    for index in range(0, len(prompts), len(OPTIONS)):
        assert outputs[0][index] == penalised_tokens(tiny_llama, prompts[index], 20), (index, samplings[index])
    assert 40 not in outputs[0][3], "a bias of -100 bans a token"
    assert len(outputs[0][6]) == 20, "no end before the least length"
    assert set(outputs[0][7]) <= set(range(3, 67)), outputs[0][7]
    assert len({tuple(tokens) for tokens in outputs[0]}) == len(prompts)
