"""A checkpoint may hold a head though `config.json` says that it is tied to the embedding: it is used, on both paths.

Hugging Face keeps two different matrices untied, and so tells which tokens are right. An equal copy is held once.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oracles.family_checks import MAX_TOKENS, PROMPTS, pipeline_tokens
from oracles.pipeline_checks import hugging_face_tokens
from oracles.tiny_models import add_head, write_tiny_gemma2, write_tiny_llama
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.models.coverage.cut import load_cut
from stageline_runtime.models.coverage.stage import build_covered_stage
from stageline_runtime.models.decoder import build_stage_model
from stageline_runtime.models.protocol import ModelBuilder, StageShape
from stageline_runtime.models.weights.stage_weights import StageWeights

Way = tuple[Callable[[Path], Path], ModelBuilder]
PATHS: dict[str, Way] = {
    "own": (write_tiny_llama, build_stage_model),
    "coverage": (write_tiny_gemma2, build_covered_stage),
    "coverage, of an own family": (write_tiny_llama, build_covered_stage),
}
WHOLE = LayerRange(first=0, last=3)


def ignore_progress(_loaded: int, _total: int) -> None:
    pass


@pytest.mark.parametrize(
    "equal", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["another head", "an equal head"]
)
@pytest.mark.parametrize(
    "path", ["own", *(pytest.param(path, marks=pytest.mark.soak) for path in PATHS if path != "own")]
)
def test_greedy_tokens_are_hugging_faces(path: str, equal: bool, tmp_path: Path) -> None:
    write, build_model = PATHS[path]
    plain = write(tmp_path / "plain")
    model_dir = add_head(write(tmp_path / "with head"), equal=equal)
    assert read_model_config(model_dir).tie_word_embeddings
    expected = hugging_face_tokens(model_dir, PROMPTS, MAX_TOKENS)
    assert (hugging_face_tokens(plain, PROMPTS, MAX_TOKENS) == expected) == equal, "the head makes no difference"
    for stage_count in (1, 2):
        actual = pipeline_tokens(model_dir, stage_count, build_model)
        wrong = [index for index, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"P={stage_count}: prompts {wrong} of {len(expected)} differ"


@pytest.mark.parametrize("equal", [False, True], ids=["another head", "an equal head"])
def test_a_lone_own_stage_holds_an_equal_head_once(equal: bool, tmp_path: Path) -> None:
    model_dir = add_head(write_tiny_llama(tmp_path), equal=equal)
    shape = StageShape(
        layers=WHOLE,
        is_first=True,
        is_last=True,
        dtype=torch.float32,
        num_cohorts=1,
        num_slots=1,
        slot_tokens=1,
    )
    weights = StageWeights(model_dir, read_model_config(model_dir), shape, ignore_progress)
    embedding = weights.embedding()
    assert (weights.head(embedding) is embedding) == equal


@pytest.mark.parametrize("equal", [False, True], ids=["another head", "an equal head"])
def test_a_lone_covered_stage_holds_an_equal_head_once(equal: bool, tmp_path: Path) -> None:
    model_dir = add_head(write_tiny_gemma2(tmp_path), equal=equal)
    cut = load_cut(model_dir, WHOLE, is_first=True, is_last=True, dtype=torch.float32, progress=ignore_progress)
    embedding, head = (cut.kept[name].get_parameter("weight") for name in ("model.embed_tokens", "lm_head"))
    assert (head is embedding) == equal
