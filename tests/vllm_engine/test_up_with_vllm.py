"""`stageline up` of the example with the stand-in for vLLM: pods, engine, gateway and answers as with any engine."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from processes.free_ports import free_port
from processes.repository_files import ROOT
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
