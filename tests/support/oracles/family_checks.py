"""Holds a model cut into stages against Hugging Face: batched requests, chunked prefills, steps that mix both."""

from pathlib import Path

import torch

from oracles.in_process_pipeline import InProcessPipeline, Request, build_stages
from oracles.pipeline_checks import Prompt, draw_prompts, hugging_face_tokens
from oracles.tiny_models import VOCAB_SIZE
from stageline_runtime.models.families import build_any_stage_model
from stageline_runtime.models.protocol import ModelBuilder

SLOTS_PER_COHORT = 6
CHUNK_TOKENS = 17
SLOT_TOKENS = 160
LONGEST_PROMPT = 100
PROMPTS: list[Prompt] = draw_prompts(20, VOCAB_SIZE, LONGEST_PROMPT)
MAX_TOKENS = [8 + (5 * index) % 15 for index in range(len(PROMPTS))]


def pipeline_tokens(
    model_dir: Path, stage_count: int, build_model: ModelBuilder = build_any_stage_model
) -> list[list[int]]:
    """Greedy tokens in float32 of `PROMPTS`, all stages in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stages = build_stages(
        model_dir,
        stage_count,
        dtype=torch.float32,
        slots_per_cohort=SLOTS_PER_COHORT,
        slot_tokens=SLOT_TOKENS,
        build_model=build_model,
    )
    pipeline = InProcessPipeline(
        stages,
        slots_per_cohort=SLOTS_PER_COHORT,
        chunk_tokens=CHUNK_TOKENS,
        padded_tokens=lambda tokens: -(-tokens // 8) * 8,
    )
    requests = [Request(list(prompt), length) for prompt, length in zip(PROMPTS, MAX_TOKENS, strict=True)]
    pipeline.generate(requests)
    torch.set_num_threads(threads)
    assert pipeline.mixed_steps > 0, "no step mixed prefill and decode"
    return [request.output for request in requests]


def assert_equals_hugging_face(model_dir: Path, *, stage_counts: tuple[int, ...] = (1, 2)) -> None:
    """Every token of every prompt, at every depth."""
    expected = hugging_face_tokens(model_dir, PROMPTS, MAX_TOKENS)
    assert len({token for output in expected for token in output}) > 10, "the model says too little to tell anything"
    for stage_count in stage_counts:
        actual = pipeline_tokens(model_dir, stage_count)
        wrong = [index for index, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1]]
        assert not wrong, (
            f"P={stage_count}: prompts {wrong} differ, of {[len(PROMPTS[index]) for index in wrong]} tokens"
        )
