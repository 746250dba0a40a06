"""What fails inside the real vLLM and how its pod says so: a load, an adapter, a step whose exception vLLM drops.

Three starts of a small model, two of which end early; so only by `make test-vllm ARGS=all`.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from oracles.tiny_models import VOCAB_SIZE, write_tiny_tokenizer
from processes.failing_worker.sitecustomize import RAISE_FILE
from processes.repository_files import ROOT
from processes.vllm_group import SupervisedGroup, supervised_group
from processes.vllm_served import NOTICED_SECONDS, START_SECONDS, vllm_python
from stageline_api import ports
from stageline_api.runtime_config import LoraAdapter
from stageline_vllm.supervisor.files_command import copy_packages

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]
RANDOM_WEIGHTS = ("--load-format", "dummy")
UNCOMPILED = ("--enforce-eager",)
"""Quicker to start, and on a CPU vLLM can't do it with a pipeline: its first step fails an assertion."""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tiny_tokenizer(directory)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(sizes | heads | kind))
    return directory


@contextmanager
def group_of_vllm(
    directory: Path, model_dir: Path, *extra_args: str, path: str = "", raise_file: str = "", **config: Any
) -> Iterator[SupervisedGroup]:
    """Supervisors that run in vLLM's environment from copied files, with `path` before them."""
    files = directory / "files"
    copy_packages(files)
    given = {
        "PYTHONPATH": os.pathsep.join(filter(None, (path, str(files)))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(vllm_python().parent.parent / "cache"),
        **({RAISE_FILE: raise_file} if raise_file else {}),
    }
    with supervised_group(
        directory, model_dir, environment=given, extra_args=extra_args,
        interpreter=vllm_python(), max_model_len=256, **config,
    ) as group:  # fmt: skip
        yield group


def wait_last_words(group: SupervisedGroup, stage: int) -> dict[str, Any]:
    group.processes[stage].wait(START_SECONDS)
    return group.last_words(stage)


def test_weights_that_are_missing_are_a_failed_load(tmp_path: Path, model_dir: Path) -> None:
    save_file({"model.norm.weight": torch.ones(256)}, model_dir / "model.safetensors", {"format": "pt"})
    with group_of_vllm(tmp_path, model_dir, *UNCOMPILED, stage_count=1) as group:
        words = wait_last_words(group, 0)
        assert (words["failure_class"], words["operation"]) == ("ModelLoad", "load the model"), group.explain()
        assert "vLLM's worker failed: ValueError: Following weights were not initialized" in words["detail"], words
        assert group.processes[0].returncode == 65


def test_an_adapter_that_vllm_cannot_read_is_a_bad_configuration(tmp_path: Path, model_dir: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}')
    (adapter / "adapter_model.safetensors").write_bytes(b"no tensors")
    adapters = (LoraAdapter(name="pirate", path=str(adapter)),)
    with group_of_vllm(
        tmp_path, model_dir, *UNCOMPILED, *RANDOM_WEIGHTS, stage_count=1, lora_adapters=adapters
    ) as group:
        words = wait_last_words(group, 0)
        assert (words["failure_class"], words["operation"]) == ("BadConfig", "load the LoRA adapters"), group.explain()
        assert "SafetensorError" in words["detail"], words


PROMPTS = [[5 + row, 17, 40 + row, 9] for row in range(6)]


def test_an_exception_that_vllm_drops_ends_the_group_before_a_wrong_token_is_out(
    tmp_path: Path, model_dir: Path
) -> None:
    """Of the first stage, with steps of others under way whose hidden states the second one would take for its own."""
    file = tmp_path / "raise"
    path = str(ROOT / "tests/support/processes/failing_worker")
    with group_of_vllm(tmp_path, model_dir, *RANDOM_WEIGHTS, path=path, raise_file=str(file), stage_count=2) as group:
        group.wait_formed(START_SECONDS)
        right = answers(group, 200)
        assert [len(tokens) for tokens in right] == [200] * len(PROMPTS), group.explain()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(answers, group, 200)
            steps = group.status(0)["steps"]
            while group.status(0)["steps"] < steps + 40:
                time.sleep(0.01)
            began = time.monotonic()
            file.touch()
            words = wait_last_words(group, 0)
            noticed = time.monotonic() - began
            cut = asked.result()
        sys.stdout.write(f"noticed after {noticed:.2f} s, {[len(tokens) for tokens in cut]} tokens\n")
        assert words["failure_class"] == "Internal", group.explain()
        assert words["detail"] == "vLLM's worker failed: RuntimeError: a step that was made to fail", group.explain()
        assert noticed < NOTICED_SECONDS, group.explain()
        other = wait_last_words(group, 1)
        assert (other["failure_class"], other["peer"]) == ("PeerLost", 0), group.explain()
        assert all(len(tokens) < 200 for tokens in cut), "it failed in the middle of them"
        assert cut == [tokens[: len(some)] for tokens, some in zip(right, cut, strict=True)]


def answers(group: SupervisedGroup, max_tokens: int) -> list[list[int]]:
    """What clients that ask all at once get before the group is gone, if it goes."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: _answer(group, prompt, max_tokens), PROMPTS))


def _answer(group: SupervisedGroup, prompt: list[int], max_tokens: int) -> list[int]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
    body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
    url = f"http://{group.addresses[0]}:{ports.VLLM_HTTP}/inference/v1/generate"
    tokens: list[int] = []
    try:
        with httpx.stream("POST", url, json=body, headers=group.headers, timeout=120, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {") and (choices := json.loads(line.removeprefix("data: ")).get("choices")):
                    tokens += choices[0]["token_ids"]
    except httpx.HTTPError:
        pass
    return tokens
