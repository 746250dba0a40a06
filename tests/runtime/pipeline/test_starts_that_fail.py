"""A group that can't start says why in a sentence: exit code, class, and what to change."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from oracles.tiny_models import write_tiny_llama
from processes.running_group import running_group, start_process
from stageline_api import env, ports


@pytest.fixture
def model_dir(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama to spoil."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "spoilt"))


def change_config(model_dir: Path, **changed: object) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_too_little_memory_says_how_much_is_missing(model_dir: Path, tmp_path: Path) -> None:
    change_config(model_dir, max_position_embeddings=10**10)
    with running_group(tmp_path / "group", model_dir, 2, start=False) as group:
        assert group.wait_ended("engine") == 66, group.account()
        words = group.last_words("engine")
        assert words["failure_class"] == "OutOfMemory"
        assert "MiB" in words["detail"]
        assert "lower spec.engine.maxModelLen" in words["detail"]
        for stage in ("stage-0", "stage-1"):
            assert group.wait_ended(stage) == 73, group.account()
            assert words["detail"] in group.last_words(stage)["detail"]


def test_weights_that_do_not_fit_the_config_name_the_tensor(model_dir: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", num_layers=3)
    shutil.copy(other / "model.safetensors", model_dir / "model.safetensors")
    with running_group(tmp_path / "group", model_dir, 2, start=False) as group:
        assert group.wait_ended("stage-1") == 65, group.account()
        words = group.last_words("stage-1")
        assert words["failure_class"] == "ModelLoad"
        assert "model.layers." in words["detail"]
        assert group.wait_ended("engine") == 71, group.account()
        assert group.last_words("engine")["peer"] == 1
        # Stage 0 may be waiting for stage 1 at the rendezvous; then it only sees that the engine is gone.
        assert group.wait_ended("stage-0") in (71, 73), group.account()


def test_a_file_that_is_no_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "model.safetensors").write_bytes(b"not safetensors at all")
    with running_group(tmp_path / "group", model_dir, 1, start=False) as group:
        assert group.wait_ended("stage-0") == 65, group.account()
        assert "model.safetensors" in group.last_words("stage-0")["detail"]
        assert "Traceback" not in group.log("stage-0")


def test_more_stages_than_layers(model_dir: Path, tmp_path: Path) -> None:
    write_tiny_llama(model_dir, num_layers=1)
    with running_group(tmp_path / "group", model_dir, 2, start=False) as group:
        assert group.wait_ended("engine") == 64, group.account()
        assert "parallelism.pipeline is 2, but the model has only 1 layer" in group.last_words("engine")["detail"]


def test_a_context_longer_than_the_model_s(model_dir: Path, tmp_path: Path) -> None:
    stages = frozenset({"stage-0"})
    with running_group(tmp_path / "group", model_dir, 1, start=False, held_back=stages, max_model_len=513) as group:
        assert group.wait_ended("engine") == 64, group.account()
        detail = group.last_words("engine")["detail"]
        assert detail == "spec.engine.maxModelLen 513 is larger than the model's context of 512"


@pytest.mark.parametrize(
    ("name", "port"),
    [("engine", ports.ENGINE_HTTP), ("engine", ports.PLAN_BUS), ("stage-0", ports.STAGE_HEALTH)],
)
def test_a_port_in_use_is_named(name: str, port: int, tiny_llama: Path, tmp_path: Path) -> None:
    held_back = frozenset({"engine", "stage-0"})
    with running_group(tmp_path, tiny_llama, 1, start=False, held_back=held_back) as group:
        with socket.create_server((group.addresses[0], port)):
            start_process(group, name)
            assert group.wait_ended(name) == 1, group.account()
        words = group.last_words(name)
        assert words["failure_class"] == "Internal"
        assert f"can't listen on {group.addresses[0]}:{port}: Address already in use" in words["detail"]
        assert "Traceback" not in group.log(name)


@pytest.mark.parametrize("name", ["engine", "stage-0"])
def test_a_bad_contract_exits_64_and_names_the_variable(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    held_back = frozenset({"engine", "stage-0"})
    with running_group(tmp_path, tiny_llama, 1, start=False, held_back=held_back) as group:
        start_process(group, name, **{env.INCARNATION: "second"})
        assert group.wait_ended(name) == 64, group.account()
        assert group.last_words(name)["failure_class"] == "BadConfig"
        assert group.last_words(name)["detail"] == f"{env.INCARNATION}='second' is not an integer"
        assert "Traceback" not in group.log(name)


def test_a_stage_of_an_older_incarnation_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """And with a wrong token too; the group goes on waiting for the right one and then stands."""
    with running_group(tmp_path, tiny_llama, 1, start=False, held_back=frozenset({"stage-0"})) as group:
        group.wait_until(lambda: group.engine_status().get("phase") == "Connecting", "the engine listens")
        start_process(group, "stage-0", **{env.INCARNATION: "0"})
        assert group.wait_ended("stage-0") == 64, group.account()
        assert group.last_words("stage-0")["detail"] == "incarnation 0 is not this group's 1"
        start_process(group, "stage-0", **{env.BUS_TOKEN: "not-the-token"})
        assert group.wait_ended("stage-0") == 64, group.account()
        assert group.last_words("stage-0")["detail"] == "the plan bus token is wrong"
        assert "not-the-token" not in group.log("stage-0") + group.log("engine")
        assert group.token not in group.log("stage-0") + group.log("engine")
        start_process(group, "stage-0")
        group.wait_ready()
