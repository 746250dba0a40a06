"""In float32, real groups of 1, 2 and 3 stages give Hugging Face's greedy tokens, whatever is batched together."""

from pathlib import Path

import pytest

from oracles.pipeline_checks import draw_prompts, greedy, hugging_face_tokens
from oracles.tiny_models import VOCAB_SIZE
from processes.running_group import running_group


@pytest.mark.parametrize(
    ("family", "stage_count"),
    [
        ("tiny_llama", 2),
        ("tiny_qwen3", 3),
        *(pytest.param("tiny_llama", count, marks=pytest.mark.soak) for count in (1, 3)),
        *(pytest.param("tiny_qwen3", count, marks=pytest.mark.soak) for count in (1, 2)),
    ],
)
def test_tiny_models(family: str, stage_count: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """More requests than slots, prompts longer than a step, slots reused; every stream has its own length."""
    model_dir: Path = request.getfixturevalue(family)
    prompts = draw_prompts(24, VOCAB_SIZE, 90)
    lengths = [1 + (5 * index) % 23 for index in range(len(prompts))]
    expected = hugging_face_tokens(model_dir, prompts, lengths)
    with running_group(
        tmp_path, model_dir, stage_count, dtype="float32", max_num_seqs=9, max_num_batched_tokens=48
    ) as group:
        actual = group.generate_all(prompts, [greedy(length) for length in lengths])
        assert actual == expected
        assert group.engine_status()["requests_running"] == 0


@pytest.fixture(scope="module")
def smollm2_expected(smollm2_dir: Path) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Twenty prompts and Hugging Face's 16 tokens for each."""
    prompts = draw_prompts(20, 49_000, 60)
    return prompts, hugging_face_tokens(smollm2_dir, prompts, [16] * len(prompts))


@pytest.mark.thorough
@pytest.mark.parametrize("stage_count", [2, *(pytest.param(count, marks=pytest.mark.soak) for count in (1, 3))])
def test_smollm2(
    stage_count: int,
    smollm2_dir: Path,
    smollm2_expected: tuple[list[tuple[int, ...]], list[list[int]]],
    tmp_path: Path,
) -> None:
    prompts, expected = smollm2_expected
    with running_group(tmp_path, smollm2_dir, stage_count, dtype="float32", max_model_len=128) as group:
        assert group.generate_all(prompts, [greedy(16)] * len(prompts)) == expected
