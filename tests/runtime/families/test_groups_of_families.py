"""Real groups of two processes give Hugging Face's greedy tokens: a mixture of experts, and a covered family."""

from collections.abc import Callable
from pathlib import Path

import pytest

from oracles.pipeline_checks import draw_prompts, greedy, hugging_face_tokens
from oracles.tiny_models import VOCAB_SIZE, write_tiny_gemma2, write_tiny_mixtral, write_tiny_qwen3_moe
from processes.running_group import running_group

MODELS: dict[str, Callable[[Path], Path]] = {
    "mixtral": lambda path: write_tiny_mixtral(path, sliding_window=30),
    "qwen3_moe": write_tiny_qwen3_moe,
    "gemma2": write_tiny_gemma2,
}


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("mixtral", "gemma2")), "qwen3_moe"]
)
def test_two_processes(name: str, tmp_path: Path) -> None:
    model_dir = MODELS[name](tmp_path / "model")
    prompts = draw_prompts(20, VOCAB_SIZE, 80)
    lengths = [4 + (5 * index) % 13 for index in range(len(prompts))]
    expected = hugging_face_tokens(model_dir, prompts, lengths)
    with running_group(
        tmp_path / "group", model_dir, 2, dtype="float32", max_num_seqs=8, max_num_batched_tokens=48
    ) as group:
        assert group.generate_all(prompts, [greedy(length) for length in lengths]) == expected, group.account()
