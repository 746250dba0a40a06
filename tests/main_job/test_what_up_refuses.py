"""Models that `stageline up` can't serve, or not in every way, once their files are read: said in a sentence."""

import json
from pathlib import Path

import httpx
import pytest
import yaml

from oracles.tiny_models import write_tiny_llama
from processes.free_ports import free_port
from processes.serving_command import run_stageline, serving


def write_model(path: Path, model_dir: Path, **spec: object) -> Path:
    manifest = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": "tiny"},
        "spec": {"model": {"source": f"file://{model_dir}"}, "parallelism": {"pipeline": 2}, **spec},
    }
    path.write_text(yaml.safe_dump(manifest))
    return path


@pytest.fixture
def tiny_dir(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model")


def once(model_file: Path, tmp_path: Path, *options: str) -> tuple[int, str]:
    """Exit status and standard error; on a port of its own unless `options` say otherwise."""
    port = () if "--port" in options else ("--port", str(free_port()))
    command = ("up", str(model_file), "--once", "hello", "--max-tokens", "4", "--state-dir", str(tmp_path / "state"))
    result = run_stageline(*command, *port, *options)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stderr


@pytest.mark.thorough
def test_too_little_memory_is_said_with_how_much_is_missing(tmp_path: Path, tiny_dir: Path) -> None:
    config = json.loads((tiny_dir / "config.json").read_text())
    config["max_position_embeddings"] = 10**12
    (tiny_dir / "config.json").write_text(json.dumps(config))
    model_file = write_model(
        tmp_path / "model.yaml", tiny_dir, restart={"maxRestarts": 0, "windowSeconds": 600, "backoffSeconds": 1}
    )
    status, message = once(model_file, tmp_path)
    assert status != 0
    assert "MiB" in message, message
    assert "maxModelLen" in message, message


@pytest.mark.thorough
def test_a_model_without_a_chat_template_answers_completions_and_explains_chat(tmp_path: Path, tiny_dir: Path) -> None:
    config_path = tiny_dir / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config.pop("chat_template", None)
    config_path.write_text(json.dumps(config))
    (tiny_dir / "chat_template.jinja").unlink(missing_ok=True)
    model_file = write_model(tmp_path / "model.yaml", tiny_dir)
    with serving(model_file, tmp_path / "up", tmp_path / "cache") as command:
        command.wait_serving()
        chat = httpx.post(
            f"{command.url}/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
            timeout=120.0,
        )
        assert chat.status_code == 400, chat.text
        assert "chat template" in chat.json()["error"]["message"]
        completion = httpx.post(
            f"{command.url}/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 4}, timeout=120.0
        )
        assert completion.status_code == 200, completion.text
