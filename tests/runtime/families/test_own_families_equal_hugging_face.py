"""In float32, each family of the own decoder gives Hugging Face's greedy tokens, cut or whole."""

from collections.abc import Callable
from pathlib import Path

import pytest

from oracles.family_checks import assert_equals_hugging_face
from oracles.tiny_models import (
    write_tiny_llama,
    write_tiny_mistral,
    write_tiny_mixtral,
    write_tiny_olmo2,
    write_tiny_qwen2,
    write_tiny_qwen2_moe,
    write_tiny_qwen3,
    write_tiny_qwen3_moe,
)
from stageline_runtime.model_facts.model_config import SUPPORTED_ARCHITECTURES, read_model_config

Writer = Callable[[Path], Path]
MODELS: dict[str, tuple[str, Writer]] = {
    "llama": ("llama", write_tiny_llama),
    "qwen3": ("qwen3", write_tiny_qwen3),
    "mistral": ("mistral", write_tiny_mistral),
    "mistral, window within a chunk": ("mistral", lambda path: write_tiny_mistral(path, sliding_window=5)),
    "mistral, window of several chunks": ("mistral", lambda path: write_tiny_mistral(path, sliding_window=70)),
    "mistral, window of two": ("mistral", lambda path: write_tiny_mistral(path, sliding_window=2)),
    "qwen2": ("qwen2", write_tiny_qwen2),
    "qwen2, tied, windows in the later layers": (
        "qwen2",
        lambda path: write_tiny_qwen2(
            path, tie_word_embeddings=True, use_sliding_window=True, sliding_window=21, max_window_layers=1
        ),
    ),
    "qwen2_moe": ("qwen2_moe", write_tiny_qwen2_moe),
    "qwen2_moe, stacked, normalised weights": (
        "qwen2_moe",
        lambda path: write_tiny_qwen2_moe(path, stacked=True, norm_topk_prob=True),
    ),
    "qwen2_moe, dense and sparse layers, windows": (
        "qwen2_moe",
        lambda path: write_tiny_qwen2_moe(
            path,
            num_hidden_layers=5,
            mlp_only_layers=[1],
            use_sliding_window=True,
            sliding_window=21,
            max_window_layers=4,
        ),
    ),
    "qwen3_moe": ("qwen3_moe", write_tiny_qwen3_moe),
    "qwen3_moe, normalised weights": ("qwen3_moe", lambda path: write_tiny_qwen3_moe(path, norm_topk_prob=True)),
    "qwen3_moe, dense and sparse layers": (
        "qwen3_moe",
        lambda path: write_tiny_qwen3_moe(path, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[1]),
    ),
    "qwen3_moe, stacked, one expert a token": (
        "qwen3_moe",
        lambda path: write_tiny_qwen3_moe(path, stacked=True, num_experts_per_tok=1),
    ),
    "olmo2": ("olmo2", write_tiny_olmo2),
    "olmo2, biases, as many heads of keys": (
        "olmo2",
        lambda path: write_tiny_olmo2(path, attention_bias=True, num_key_value_heads=4),
    ),
    "mixtral": ("mixtral", write_tiny_mixtral),
    "mixtral, stacked, windows": ("mixtral", lambda path: write_tiny_mixtral(path, stacked=True, sliding_window=9)),
}


USUAL = (
    "llama",
    "mistral, window of several chunks",
    "qwen3",
    "qwen2_moe, dense and sparse layers, windows",
    "qwen3_moe, dense and sparse layers",
    "mixtral",
    "olmo2",
)


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS]
)
def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    family, write = MODELS[name]
    model_dir = write(tmp_path)
    assert read_model_config(model_dir).architecture == family
    assert_equals_hugging_face(model_dir)


def test_every_own_family_is_tested() -> None:
    assert {family for family, _ in MODELS.values()} == set(SUPPORTED_ARCHITECTURES)
