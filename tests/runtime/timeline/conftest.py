"""A tiny model with random weights, written once per session."""

from pathlib import Path

import pytest

from oracles.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of six layers."""
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "model", num_layers=6)
