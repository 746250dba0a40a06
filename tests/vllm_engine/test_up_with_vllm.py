"""`stageline up` of the example with the stand-in for vLLM: pods, engine, gateway and answers as with any engine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from processes.free_ports import free_port
from processes.repository_files import ROOT
from processes.serving_command import serving
from processes.vllm_group import interpreter_with_vllm

COMMAND = (sys.executable, "-m", "stageline_cli.main", "up")
START_SECONDS = 400


def example_of(directory: Path, model_dir: Path) -> Path:
    """The example as it is, over a model that is here."""
    manifest = yaml.safe_load((ROOT / "examples/smollm2_vllm.yaml").read_text())
    manifest["spec"]["model"]["source"] = f"file://{model_dir}"
    file = directory / "model.yaml"
    file.write_text(yaml.safe_dump(manifest))
    return file


def test_the_example_answers_and_ends_clean(tmp_path: Path, smollm2_dir: Path) -> None:
    file = example_of(tmp_path, smollm2_dir)
    options = ["--state-dir", str(tmp_path / "state"), "--port", str(free_port()), "--max-tokens", "5", "--plain"]
    environment = os.environ | {"STAGELINE_VLLM_PYTHON": str(interpreter_with_vllm(tmp_path))}
    done = subprocess.run(
        [*COMMAND, str(file), "--once", "The capital of France is", *options],
        env=environment, capture_output=True, text=True, check=False, timeout=START_SECONDS,
    )  # fmt: skip
    logs = "\n".join(path.read_text(errors="replace") for path in (tmp_path / "state").rglob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert len(done.stdout.strip()) > 0, done.stderr + logs
    assert "Ready" not in done.stdout, "with --once, standard output has the answer and nothing else"


DEAR: dict[str, dict[str, Any]] = {
    "a schema": {"guided_json": {"type": "integer", "multipleOf": 399989}},
    "a grammar": {
        "guided_grammar": "start: s\ns: "
        + " | ".join(" ".join("s" * count) for count in range(2, 110))
        + ' | /[a-z]/ | ""\n'
    },
}


def test_what_is_too_dear_to_guide_never_comes_to_vllm(
    tmp_path: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_VLLM_PYTHON", str(interpreter_with_vllm(tmp_path)))
    with serving(example_of(tmp_path, smollm2_dir), tmp_path, tmp_path / "cache", "--plain") as command:
        command.wait_serving(START_SECONDS)
        told = {
            name: httpx.post(
                f"{command.url}/v1/completions",
                json={"model": "smollm2", "prompt": "A", "max_tokens": 2, **guided},
                trust_env=False,
                timeout=START_SECONDS,
            )
            for name, guided in {**DEAR, "one that is not": {"guided_regex": "[0-9]{2}"}}.items()
        }
    assert [answer.status_code for answer in told.values()] == [400, 400, 200], {each: told[each].text for each in told}
    for name in DEAR:
        assert "can't guide an answer: it takes too long to compile, or to follow" in told[name].text
