"""`stageline up` and `stageline down` as a person types them: refusals before anything starts, and ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from oracles.tiny_models import write_tiny_llama
from processes.free_ports import free_port
from stageline_local.session.instance import Instance, process_start_ticks, read_record
from stageline_runtime.prepare.cache import prepared_model_dir


def stageline(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"} | environ
    command = [sys.executable, "-m", "stageline_cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


def manifest(tmp_path: Path, **spec: object) -> Path:
    (tmp_path / "model").mkdir(exist_ok=True)
    document = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": "tiny"},
        "spec": {"model": {"source": f"file://{tmp_path / 'model'}"}, "parallelism": {"pipeline": 2}} | spec,
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("spec", "field"), [({"parallelism": {"pipeline": 0}}, "parallelism.pipeline"), ({"replicas": 0}, "replicas")]
)
def test_a_bad_file_is_refused_by_its_fields(spec: dict[str, object], field: str, tmp_path: Path) -> None:
    done = stageline("up", manifest(tmp_path, **spec), "--state-dir", tmp_path / "state")
    assert done.returncode == 2, done
    assert f"spec.{field}: 0 is not allowed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "state").exists()


def test_a_directory_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    path = manifest(tmp_path, model={"source": f"file://{tmp_path}/nowhere"})
    done = stageline("up", path, "--state-dir", tmp_path / "state", "--port", str(free_port()))
    assert done.returncode == 2, done
    assert 'spec.model.source: "file://' in done.stderr, done
    assert "there is no such directory on this machine" in done.stderr


def test_a_cut_that_a_cached_model_cannot_have_is_refused_before_anything_starts(tmp_path: Path) -> None:
    source = "pypi://some-model==1.0/model.gguf"
    entry = prepared_model_dir(source, tmp_path / "cache")
    write_tiny_llama(entry)
    path = manifest(tmp_path, model={"source": source}, parallelism={"pipeline": 99})
    done = stageline("up", path, "--cache", tmp_path / "cache", "--state-dir", tmp_path / "state")
    assert done.returncode == 2, done
    assert "spec.parallelism.pipeline: 99 is not allowed: must be at most" in done.stderr
    assert not (tmp_path / "state").exists()


def test_a_length_beyond_a_cached_models_context_is_refused_before_anything_starts(tmp_path: Path) -> None:
    source = "pypi://some-model==1.0/model.gguf"
    write_tiny_llama(prepared_model_dir(source, tmp_path / "cache"))
    path = manifest(tmp_path, model={"source": source}, engine={"maxModelLen": 999999})
    done = stageline("up", path, "--cache", tmp_path / "cache", "--state-dir", tmp_path / "state")
    assert done.returncode == 2, done
    assert "spec.engine.maxModelLen: 999999 is not allowed: must be at most" in done.stderr
    assert not (tmp_path / "state").exists()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = stageline("up", manifest(tmp_path), "--state-dir", tmp_path / "state", "--port", str(port))
    assert done.returncode == 1, done
    assert f"can't listen on 127.0.0.1:{port}" in done.stderr
    assert "in use" in done.stderr
    assert "--port" in done.stderr


def test_a_second_up_is_refused_naming_the_first(tmp_path: Path) -> None:
    claimed = Instance.claim(tmp_path / "state" / "tiny", "tiny", "http://127.0.0.1:1")
    try:
        done = stageline("up", manifest(tmp_path), "--state-dir", tmp_path / "state", "--port", str(free_port()))
    finally:
        claimed.release()
    assert done.returncode == 1, done
    assert f"tiny is already up (pid {os.getpid()}, http://127.0.0.1:1)" in done.stderr


def test_a_token_that_is_not_set_is_asked_for(tmp_path: Path) -> None:
    source = {"source": "hf://org/name", "tokenSecretRef": {"name": "hub"}}
    path = manifest(tmp_path, model=source)
    done = stageline("up", path, "--state-dir", tmp_path / "state", "--port", str(free_port()))
    assert done.returncode == 1, done
    assert "HF_TOKEN" in done.stderr


def test_too_little_memory_is_said_and_nothing_stays(tmp_path: Path) -> None:
    path = manifest(tmp_path, template={"resources": {"requests": {"memory": "900Ti"}}})
    done = stageline("up", path, "--state-dir", tmp_path / "state", "--port", str(free_port()))
    assert done.returncode == 1, done
    assert "too little memory: pod 'tiny-0-1-0' requests 900.0 TiB" in done.stderr
    assert read_record(tmp_path / "state" / "tiny") is None


def test_a_field_that_one_machine_cannot_honour_is_named(tmp_path: Path) -> None:
    path = manifest(tmp_path, template={"nodeSelector": {"gpu": "yes"}})
    done = stageline("up", path, "--state-dir", tmp_path / "state", "--port", str(free_port()))
    assert done.returncode == 1, done
    assert "spec.nodeSelector['gpu']" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_made_ends_it_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = manifest(tmp_path, model={"source": "pypi://some-model==1.0/model.gguf"})
    arguments = ("--cache", tmp_path / "file" / "cache", "--state-dir", tmp_path / "state", "--port", str(free_port()))
    done = stageline("up", path, *arguments)
    assert done.returncode == 1, done
    assert "container prepare of pod tiny-0-1-" in done.stderr
    assert "can't start: CreateContainer" in done.stderr
    assert str(tmp_path / "file") in done.stderr
    assert "Traceback" not in done.stderr
    assert read_record(tmp_path / "state" / "tiny") is None


@pytest.mark.parametrize("restarts", [0, 5])
def test_an_image_that_is_not_this_installation_ends_with_the_cause(tmp_path: Path, restarts: int) -> None:
    path = manifest(tmp_path, template={"image": "registry.example/else:1"}, restart={"maxRestarts": restarts})
    done = stageline("up", path, "--state-dir", tmp_path / "state", "--port", str(free_port()), "--once", "hello")
    assert done.returncode == 1, done
    assert "ImagePull: image 'registry.example/else:1' is not known to this node" in done.stderr
    assert done.stdout == ""


def test_a_timeout_says_what_was_waited_for(tmp_path: Path) -> None:
    """Its package index takes the connection and never answers, so that it neither becomes ready nor fails."""
    path = manifest(tmp_path, model={"source": "pypi://some-model==1.0/model.gguf"})
    options = ("--cache", tmp_path / "cache", "--state-dir", tmp_path / "state", "--port", str(free_port()))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        done = stageline(
            "up", path, *options, "--timeout-seconds", "3", PIP_INDEX_URL=index, PIP_CONFIG_FILE="/dev/null"
        )
    assert done.returncode == 1, done
    assert "not ready within 3 s (stage 0:" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_starting_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-m", "stageline_cli.main", "up", str(manifest(tmp_path)), "--state-dir", str(state)]
    process = subprocess.Popen([*command, "--port", str(free_port())], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not list(state.glob("tiny/logs/*")):
        assert time.monotonic() < deadline, process.stderr.read() if process.stderr and process.poll() else "no start"
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert "stopping" in errors
    assert list((state / "tiny" / "pods").glob("*")) == []
    assert read_record(state / "tiny") is None


def test_down_with_nothing_up_says_so(tmp_path: Path) -> None:
    done = stageline("down", "--state-dir", tmp_path)
    assert (done.returncode, done.stdout) == (0, "nothing is up\n")
    done = stageline("down", "tiny", "--state-dir", tmp_path)
    assert (done.returncode, done.stdout) == (0, "tiny is not up\n")


def test_down_never_signals_a_process_that_only_has_the_same_id(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        start_ticks = process_start_ticks(bystander.pid)
        assert start_ticks is not None
        record = {"name": "tiny", "pid": bystander.pid, "start_ticks": start_ticks - 1, "url": "", "ready": True}
        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny" / "instance.json").write_text(json.dumps(record))
        done = stageline("down", "tiny", "--state-dir", tmp_path)
        assert (done.returncode, done.stdout) == (0, "tiny is not up\n")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
