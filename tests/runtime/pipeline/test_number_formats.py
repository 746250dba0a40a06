"""What a float16 checkpoint is computed in: widened by `auto` on CPUs, at half the bytes where that is asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oracles.pipeline_checks import draw_prompts, greedy, stage_samples
from oracles.tiny_models import VOCAB_SIZE, write_tiny_llama
from processes.running_group import RunningGroup, running_group
from stageline_runtime.model_facts.model_fields import chosen_dtype


@pytest.mark.parametrize(
    ("asked", "of_model", "on_devices", "expected"),
    [
        ("auto", "float16", False, "float32"),
        ("auto", "float16", True, "float16"),
        ("auto", "bfloat16", False, "bfloat16"),
        ("auto", "float32", True, "float32"),
        ("float16", "bfloat16", False, "float16"),
        ("float32", "float16", True, "float32"),
    ],
)
def test_auto_is_the_checkpoints_own_but_for_float16_on_cpus(
    asked: str, of_model: str, on_devices: bool, expected: str
) -> None:
    assert chosen_dtype(asked, of_model, on_devices=on_devices) == expected


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), dtype="float16")


def reference(model_dir: Path, prompt: tuple[int, ...], count: int, dtype: torch.dtype) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    said = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(said[0, len(prompt) :].tolist())


def test_a_float16_checkpoint_answers_as_hugging_face_in_the_format_it_is_computed_in(
    model_dir: Path, tmp_path: Path
) -> None:
    [prompt] = draw_prompts(1, VOCAB_SIZE, 20)
    held = {}
    for asked, computed in (("auto", torch.float32), ("float16", torch.float16)):
        with running_group(tmp_path / asked, model_dir, 2, dtype=asked, max_num_seqs=2) as group:
            assert group.generate(prompt, greedy(12)) == reference(model_dir, prompt, 12, computed)
            held[computed] = memory_bytes(group)
    assert held[torch.float16] == held[torch.float32] / 2, held


def memory_bytes(group: RunningGroup) -> float:
    """Weights and KV cache of the first stage."""
    return sum(stage_samples(group, 0)["stageline_stage_memory_bytes"].values())
