"""Tiny models with random weights, written once per session."""

import os
import shutil
from pathlib import Path

import pytest

from oracles.tiny_models import write_early_exit_pair, write_tiny_llama, write_tiny_qwen3


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of six layers."""
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "model", num_layers=6)


@pytest.fixture(scope="session")
def early_exit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama of eight layers, and a draft model of the first one that mostly says the same."""
    return write_early_exit_pair(tmp_path_factory.mktemp("early-exit"), num_layers=8)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of five layers, which no cut halves; its head is not tied."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model", num_layers=5, tie_word_embeddings=False)


@pytest.fixture
def stuck_model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A checkpoint whose index can be opened but never answers, like a file of a network storage that is gone."""
    directory = tmp_path / "stuck"
    shutil.copytree(tiny_llama, directory)
    os.mkfifo(directory / "model.safetensors.index.json")
    return directory
