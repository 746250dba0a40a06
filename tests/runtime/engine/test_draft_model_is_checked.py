"""A draft model has to be there, to be one that can be run, and to number tokens as the model does."""

import json
from pathlib import Path

import pytest

from oracles.tiny_models import write_tiny_llama, write_tiny_qwen3
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import RuntimeConfig, SpeculativeConfig
from stageline_runtime.engine.draft_model import read_draft_model
from stageline_runtime.termination import RuntimeFailure


def config(draft: str | None) -> RuntimeConfig:
    return RuntimeConfig(
        model_name="m",
        namespace="n",
        served_name="m",
        source="file:///m",
        cache_dir="/nowhere",
        stage_count=1,
        speculative=SpeculativeConfig(draft_source=draft),
    )


def refused(draft: str, model: Path) -> str:
    with pytest.raises(RuntimeFailure) as caught:
        read_draft_model(config(draft), model)
    assert caught.value.failure_class is FailureClass.BAD_CONFIG
    assert caught.value.detail.startswith(f"spec.engine.speculative.draft.source {draft}: ")
    return caught.value.detail


def test_another_family_of_another_size_will_do(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    draft = write_tiny_qwen3(tmp_path / "draft", num_layers=1)
    found = read_draft_model(config(f"file://{draft}"), model)
    assert found is not None
    assert (found.directory, found.config.num_layers) == (draft, 1)
    assert read_draft_model(config(None), model) is None


def test_another_vocabulary_is_refused_by_the_first_token_that_differs(tmp_path: Path) -> None:
    model, draft = (write_tiny_llama(tmp_path / name) for name in ("model", "draft"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    detail = refused(f"file://{draft}", model)
    index = vocabulary["b"]
    assert f'another vocabulary than the model: token "a" is {index}, and {index + 1} in the draft model' in detail


def test_what_can_not_be_run_or_is_not_there_is_refused(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    assert "config.json" in refused(f"file://{tmp_path}/missing", model)
    strange = write_tiny_llama(tmp_path / "strange")
    (strange / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "mamba" in refused(f"file://{strange}", model)
