"""The two ways in which a pod gets supervisor and plugin beside vLLM, each with the real wheel and one real start.

Carried: an init container copies files, and vLLM's image is unchanged. Baked in: a wheel of Stageline is installed
where vLLM is. What vLLM loads has random weights. That its steps are told shows that the plugin is
there, and so does that all of its processes end with a supervisor that is killed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from oracles.tiny_models import VOCAB_SIZE, write_tiny_tokenizer
from processes.repository_files import ROOT
from processes.serving_command import descendants, wait_gone
from processes.vllm_group import SupervisedGroup, children_of, supervised_group
from processes.vllm_served import START_SECONDS, vllm_python
from stageline_api import ports

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a stage's container begins, and where its files lie."""

    interpreter: Path
    command: tuple[str, ...]
    environment: dict[str, str]
    files: Path


def carried(directory: Path) -> Delivery:
    files = directory / "files"
    run(sys.executable, "-m", "stageline_cli.main", "vllm-files", str(files))
    return Delivery(vllm_python(), ("-m", "stageline_vllm.supervisor"), {"PYTHONPATH": str(files)}, files)


def baked_in(directory: Path) -> Delivery:
    """An environment that adds Stageline's own wheel, without any dependency, to what vLLM's has."""
    wheels, home = directory / "wheels", directory / "environment"
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        str(wheels),
        str(ROOT),
    )
    run(str(vllm_python()), "-m", "venv", "--without-pip", str(home))
    interpreter = home / "bin" / "python"
    of_vllm = run(str(vllm_python()), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    files = Path(run(str(interpreter), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (files / "vllm.pth").write_text(f"{of_vllm}\n")
    (wheel,) = wheels.glob("stageline-*.whl")
    run(sys.executable, "-m", "pip", "--quiet", "--python", str(interpreter), "install", "--no-deps", str(wheel))
    return Delivery(interpreter, (str(home / "bin" / "stageline"), "vllm-stage"), {"PYTHONPATH": ""}, files)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tiny_tokenizer(directory)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(sizes | heads | kind))
    return directory


def steps_of(group: SupervisedGroup) -> float:
    page = httpx.get(f"http://{group.addresses[0]}:{ports.STAGE_HEALTH}/metrics", timeout=60, trust_env=False).text
    lines = (line for line in page.splitlines() if line.startswith("stageline_stage_steps_total{"))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.parametrize("deliver", [carried, baked_in])
def test_the_real_vllm_loads_what_was_delivered(
    deliver: Callable[[Path], Delivery], tmp_path: Path, model_dir: Path
) -> None:
    delivery = deliver(tmp_path)
    cache = vllm_python().parent.parent / "cache"
    environment = delivery.environment | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(cache)}
    arguments = ("--load-format", "dummy", "--enforce-eager")
    with supervised_group(
        tmp_path, model_dir, stage_count=1, environment=environment, extra_args=arguments,
        interpreter=delivery.interpreter, command=delivery.command, max_model_len=256,
    ) as group:  # fmt: skip
        group.wait_formed(START_SECONDS)
        before = steps_of(group)
        answer = group.generate(max_tokens=5)
        assert answer.status_code == 200, answer.text
        assert steps_of(group) - before >= 5, group.explain()
        assert set(group.statuses().values()) == {401}, "whoever reaches vLLM's server gets nothing of it"
        known = group.statuses(**group.headers)
        assert (known["POST /inference/v1/generate"], known["POST /invocations"]) == (200, 200), known
        assert group.key not in group.log(0)
        (node,) = children_of(group.processes[0].pid)
        variables = Path(f"/proc/{node}/environ").read_bytes().decode().split("\0")
        path = next(each for each in variables if each.startswith("PYTHONPATH=")).partition("=")[2]
        plugins = Path(path.split(os.pathsep)[0]) / "stageline_vllm"
        assert plugins.resolve().is_relative_to(delivery.files.resolve()), path
        started = [node, *descendants(node)]
        assert len(started) >= 3, "the server, its engine core and a worker"
        group.processes[0].kill()
        wait_gone(started)
