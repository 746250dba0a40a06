"""Tiny models with random weights, written once per session."""

from pathlib import Path

import pytest

from tiny_models import write_tiny_llama, write_tiny_qwen3


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of six layers."""
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "model", num_layers=6)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of five layers, which no cut halves; its head is not tied."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model", num_layers=5, tie_word_embeddings=False)
