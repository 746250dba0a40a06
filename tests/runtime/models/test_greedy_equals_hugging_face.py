"""In float32, greedy tokens of a pipeline of 1, 2 or 3 stages are those of Hugging Face's `generate`."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.in_process_pipeline import InProcessPipeline, Request, build_stages
from oracles.tiny_models import write_tiny_llama, write_tiny_qwen3

SLOTS_PER_COHORT = 6
CHUNK_TOKENS = {1: 8, 2: 80, 3: 17}
"""By stage count: chunks that end on, after and between the sizes that attention works in."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw_requests(vocab_size: int, *, count: int, longest_prompt: int, longest_output: int) -> list[Request]:
    """Random prompts of different lengths, from one token up; lengths around the chunk and bucket sizes included."""
    chooser = random.Random(7)
    lengths = [1, 2, 7, 8, 9, 63, 64, 65][: count // 2]
    lengths += [chooser.randint(1, longest_prompt) for _ in range(count - len(lengths))]
    return [
        Request(
            prompt=[chooser.randrange(3, vocab_size) for _ in range(length)],
            max_tokens=chooser.randint(longest_output // 2, longest_output),
        )
        for length in lengths
    ]


def reference_outputs(model_dir: Path, requests: list[Request], dtype: torch.dtype = torch.float32) -> list[list[int]]:
    """Hugging Face's greedy continuation of each prompt alone, end-of-sequence ignored."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    model.generation_config.eos_token_id = None
    outputs = []
    for request in requests:
        prompt = torch.tensor([request.prompt])
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        outputs.append(generated[0, prompt.shape[1] :].tolist())
    return outputs


def assert_pipelines_agree(model_dir: Path, requests: list[Request], *, stage_counts: tuple[int, ...]) -> None:
    expected = reference_outputs(model_dir, requests)
    assert len({token for output in expected for token in output}) > 10, "the model says too little to tell anything"
    for stage_count in stage_counts:
        stages = build_stages(
            model_dir, stage_count, dtype=torch.float32, slots_per_cohort=SLOTS_PER_COHORT, slot_tokens=256
        )
        pipeline = InProcessPipeline(
            stages,
            slots_per_cohort=SLOTS_PER_COHORT,
            chunk_tokens=CHUNK_TOKENS[stage_count],
            padded_tokens=lambda tokens: -(-tokens // 8) * 8,
        )
        run = [Request(prompt=request.prompt, max_tokens=request.max_tokens) for request in requests]
        pipeline.generate(run)
        assert pipeline.mixed_steps > 0, "no step mixed prefill and decode"
        for index, (request, tokens) in enumerate(zip(run, expected, strict=True)):
            assert request.output == tokens, f"P={stage_count}, prompt {index} of {len(request.prompt)} tokens"


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama, tied": write_tiny_llama,
    "llama, own head and odd head size": lambda path: write_tiny_llama(path, tie_word_embeddings=False, head_dim=24),
    "llama, one kv head per head": lambda path: write_tiny_llama(path, num_kv_heads=4),
    "qwen3, tied": write_tiny_qwen3,
    "qwen3, own head": lambda path: write_tiny_qwen3(path, tie_word_embeddings=False),
}
USUAL = ("llama, own head and odd head size", "qwen3, tied")


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS]
)
def test_tiny_model_answers_like_hugging_face(name: str, tmp_path: Path) -> None:
    model_dir = MODELS[name](tmp_path)
    requests = draw_requests(269, count=24, longest_prompt=100, longest_output=20)
    assert_pipelines_agree(model_dir, requests, stage_counts=(1, 2, 3))


def test_biases_and_scaled_rotary_frequencies_are_those_of_hugging_face(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(
        vocab_size=269,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=scaling,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    requests = draw_requests(269, count=20, longest_prompt=120, longest_output=16)
    assert_pipelines_agree(tmp_path, requests, stage_counts=(1, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("write_model", [write_tiny_llama, pytest.param(write_tiny_qwen3, marks=pytest.mark.thorough)])
def test_at_half_precision_pipeline_depth_changes_no_token(
    write_model: Callable[..., Path], dtype: str, tmp_path: Path
) -> None:
    """With every step padded to the same size, though rows meet other rows in other slots at each depth."""
    model_dir = write_model(tmp_path, dtype=dtype)
    outputs = {}
    for stage_count in (1, 2, 3):
        stages = build_stages(
            model_dir, stage_count, dtype=getattr(torch, dtype), slots_per_cohort=SLOTS_PER_COHORT, slot_tokens=256
        )
        requests = draw_requests(269, count=20, longest_prompt=100, longest_output=20)
        InProcessPipeline(
            stages, slots_per_cohort=SLOTS_PER_COHORT, chunk_tokens=8, padded_tokens=lambda _: 8 * SLOTS_PER_COHORT
        ).generate(requests)
        outputs[stage_count] = [request.output for request in requests]
    assert outputs[2] == outputs[1]
    assert outputs[3] == outputs[1]


def test_float16_says_almost_all_tokens_of_hugging_face_in_float16(tmp_path: Path) -> None:
    """Its ten bits of mantissa round otherwise in another order of sums; bfloat16's seven say far fewer."""
    model_dir = write_tiny_llama(tmp_path, dtype="float16")
    requests = draw_requests(269, count=20, longest_prompt=60, longest_output=8)
    expected = reference_outputs(model_dir, requests, torch.float16)
    stages = build_stages(model_dir, 2, dtype=torch.float16, slots_per_cohort=SLOTS_PER_COHORT, slot_tokens=256)
    InProcessPipeline(stages, slots_per_cohort=SLOTS_PER_COHORT, chunk_tokens=80, padded_tokens=lambda n: n).generate(
        requests
    )
    equal = sum(request.output == tokens for request, tokens in zip(requests, expected, strict=True))
    assert equal >= 18, [(request.output, tokens) for request, tokens in zip(requests, expected, strict=True)]
