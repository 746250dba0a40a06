"""A device stage whose rows go through Triton's kernels, in the interpreter, gives the tokens of one with plain rows.

Attention is plain torch in both, so that a difference can only come from the kernels on rows and how layers call them.
The stages run in a process of their own, because Triton decides when it is imported whether kernels are interpreted.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.tiny_models import write_tiny_llama, write_tiny_qwen2_moe, write_tiny_qwen3, write_tiny_qwen3_moe
from stageline_bench.gpu_check.one_stage import Answers, draw_prompts, whole_model
from stageline_runtime.model_facts.model_config import ModelConfig, read_model_config
from stageline_runtime.models.families import device_builder
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.plan_bus.messages import GraphMode

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is missing: it comes with torch's CUDA build only"
)
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: write_tiny_llama(path, num_layers=2),
    "norms of heads": lambda path: write_tiny_qwen3(path, num_layers=2),
    "a mixture with a shared expert": lambda path: write_tiny_qwen2_moe(path, num_hidden_layers=2),
    "a mixture without one": lambda path: write_tiny_qwen3_moe(path, num_hidden_layers=2),
}
NUM_PROMPTS = 3
NUM_TOKENS = 10


def test_tokens_are_those_of_plain_rows(tmp_path: Path) -> None:
    directories = [str(write(tmp_path / name)) for name, write in MODELS.items()]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, __file__, *directories],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    for name, of_model in zip(MODELS, found, strict=True):
        assert len({token for text in of_model["plain"] for token in text}) > 3, (name, of_model)
        assert of_model["kernels"] == of_model["plain"], (name, of_model)
        kernels = Counter(kernel for kernel, _ in of_model["by steps"])
        gates = 0 if name == "a mixture without one" else 1
        assert kernels == Counter(normalise_rows=2, rotate_heads=1, gate_rows=gates), (name, of_model["by steps"])
        assert of_model["by loading"] == of_model["by steps"], (name, "loading compiles what steps launch")


def compare(model_dir: Path, launched: set[tuple[str, str]]) -> dict[str, Any]:
    """Tokens with plain rows and with the kernels, and the kernels that loading and then steps have launched."""
    config = read_model_config(model_dir)
    prompts = draw_prompts(NUM_PROMPTS, config.vocab_size)
    launched.clear()
    plain = answers(model_dir, config, has_row_kernels=False).greedy(prompts, NUM_TOKENS)
    assert not launched, f"plain rows launched {launched}"
    stage = answers(model_dir, config, has_row_kernels=True)
    by_loading = sorted(launched)
    launched.clear()
    tokens = stage.greedy(prompts, NUM_TOKENS)
    return {"plain": plain, "kernels": tokens, "by loading": by_loading, "by steps": sorted(launched)}


def answers(model_dir: Path, config: ModelConfig, *, has_row_kernels: bool) -> Answers:
    """The whole model on one device in disguise."""
    device = ImmediateAccelerator()
    build = device_builder(device, PlainAttention, has_row_kernels=has_row_kernels)
    shape = whole_model(config, NUM_PROMPTS, torch.float32)
    return Answers(build(model_dir, config, shape, lambda *_: None), GraphMode.OFF, device)


def note_launches() -> set[tuple[str, str]]:
    """Each kernel with the constants that it is launched with from now on: what a GPU compiles once each."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: set[tuple[str, str]] = set()
    run = InterpretedFunction.run

    def noted(function: Any, *given: Any, **named: Any) -> Any:
        constants = {name: value for name, value in named.items() if name not in ("grid", "warmup")}
        launched.add((function.__name__, json.dumps(constants)))
        return run(function, *given, **named)

    InterpretedFunction.run = noted
    return launched


if __name__ == "__main__":
    torch.set_num_threads(1)
    noted_launches = note_launches()
    json.dump([compare(Path(given), noted_launches) for given in sys.argv[1:]], sys.stdout)
