"""Code that a checkpoint brings is run only from its own directory, and what is missing there is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from stageline_api.failures import FailureClass
from stageline_runtime.termination import RuntimeFailure
from stageline_vllm.supervisor.model_code import check_model_code

OWN = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
TRUSTED = ("--trust-remote-code",)


def model(directory: Path, auto_map: Any, *files: str, config: str = "config.json") -> Path:
    (directory / config).write_text(json.dumps({"auto_map": auto_map}))
    for name in files:
        (directory / name).touch()
    return directory


@pytest.mark.parametrize("words", [TRUSTED, ("--trust_remote_code",), ("--quantization", "fp8", "--trust-rem")])
def test_code_that_is_not_there_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeFailure) as refused:
        check_model_code(model(tmp_path, OWN, "configuration_own.py"), words)
    assert refused.value.failure_class is FailureClass.BAD_CONFIG
    assert "extraArgs has --trust-remote-code, but config.json wants modeling_own.py, which" in refused.value.detail
    assert "give a file:// or pvc:// source that holds it" in refused.value.detail


def test_code_of_another_repository_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"wants org/other--configuration\.py"):
        check_model_code(model(tmp_path, {"AutoConfig": "org/other--configuration.Config"}), TRUSTED)


def test_a_tokenizers_code_counts_too(tmp_path: Path) -> None:
    both = {"AutoTokenizer": ["tokenization_own.Slow", None]}
    with pytest.raises(RuntimeFailure, match=r"tokenizer_config\.json wants tokenization_own\.py"):
        check_model_code(model(tmp_path, both, config="tokenizer_config.json"), TRUSTED)


@pytest.mark.parametrize(
    ("auto_map", "words"),
    [
        (OWN, ()),
        (OWN, ("--tokenizer-mode", "--trust-re")),
        (None, TRUSTED),
        ("odd", TRUSTED),
        ({"AutoConfig": 3}, TRUSTED),
    ],
)
def test_where_no_code_would_be_run_nothing_is_said(tmp_path: Path, auto_map: Any, words: tuple[str, ...]) -> None:
    check_model_code(model(tmp_path, auto_map), words)


def test_code_that_is_there_is_vllms_to_run(tmp_path: Path) -> None:
    check_model_code(model(tmp_path, OWN, "configuration_own.py", "modeling_own.py"), TRUSTED)
    check_model_code(tmp_path / "absent", TRUSTED)
