"""In float32, models computed by Hugging Face's layers give its greedy tokens, cut or whole; both paths agree."""

from collections.abc import Callable
from pathlib import Path

import pytest

from oracles.family_checks import assert_equals_hugging_face, pipeline_tokens
from oracles.tiny_models import (
    write_tiny_cohere2,
    write_tiny_gemma2,
    write_tiny_gemma3,
    write_tiny_granite,
    write_tiny_llama,
    write_tiny_mistral,
    write_tiny_phi3,
    write_tiny_qwen2,
    write_tiny_qwen3,
)
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.models.coverage.stage import build_covered_stage

Writer = Callable[[Path], Path]
COVERED: dict[str, Writer] = {
    "cohere2": write_tiny_cohere2,
    "gemma2": write_tiny_gemma2,
    "gemma3_text": write_tiny_gemma3,
    "granite": write_tiny_granite,
    "phi3": write_tiny_phi3,
}
BOTH_WAYS: dict[str, Writer] = {
    "llama": write_tiny_llama,
    "qwen2": write_tiny_qwen2,
    "qwen3": write_tiny_qwen3,
    "mistral with a window": lambda path: write_tiny_mistral(path, sliding_window=11),
}


@pytest.mark.parametrize(
    "family", ["gemma2", *(pytest.param(name, marks=pytest.mark.thorough) for name in COVERED if name != "gemma2")]
)
def test_greedy_tokens(family: str, tmp_path: Path) -> None:
    model_dir = COVERED[family](tmp_path)
    config = read_model_config(model_dir)
    assert (config.architecture, config.is_covered) == (family, True)
    assert_equals_hugging_face(model_dir)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.soak) for name in BOTH_WAYS if name != "llama")]
)
def test_own_decoder_and_hugging_faces_layers_agree(name: str, tmp_path: Path) -> None:
    model_dir = BOTH_WAYS[name](tmp_path)
    assert pipeline_tokens(model_dir, 2) == pipeline_tokens(model_dir, 2, build_covered_stage)
