"""LoRA adapters by the real vLLM over two stages: models of their own by name, each with its own answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from processes.vllm_served import Served, served_by_vllm

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(4 * 3600)]
RANK = 8
HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 576, 30, 9, 64
"""SmolLM2-135M's."""
LAYERS = {"first": range(5), "second": range(NUM_LAYERS - 5, NUM_LAYERS), "nothing": range(5)}
"""Each adapter changes layers of one stage alone; `nothing` has matrices whose product is zero."""


def write_adapter(directory: Path, name: str) -> None:
    """As PEFT writes one: random matrices for the query projections, large enough to change greedy answers."""
    import torch
    from safetensors.torch import save_file

    path = directory / name
    path.mkdir(parents=True)
    noise = torch.Generator().manual_seed(len(name))
    tensors: dict[str, torch.Tensor] = {}
    for layer in LAYERS[name]:
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        down = torch.randn(RANK, HIDDEN_SIZE, generator=noise) / HIDDEN_SIZE**0.5
        up = torch.randn(NUM_HEADS * HEAD_DIM, RANK, generator=noise) * (0.0 if name == "nothing" else 4.0)
        tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("adapters")
    for name in LAYERS:
        write_adapter(directory, name)
    listed = [{"name": name, "path": f"/adapters/{name}"} for name in LAYERS]
    volume = {"name": "adapters", "mountPath": "/adapters", "hostPath": str(directory)}
    engine, template = {"loraAdapters": listed}, {"volumes": [volume]}
    with served_by_vllm(tmp_path_factory.mktemp("vllm"), engine=engine, template=template) as running:
        yield running


def answer(served: Served, model: str) -> str:
    body = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    done = httpx.post(f"{served.command.url}/v1/completions", json=body, timeout=300.0, trust_env=False)
    assert done.status_code == httpx.codes.OK, f"{done.text}\n{served.logs()}"
    return str(done.json()["choices"][0]["text"])


def test_adapters_are_models_of_their_own_on_whichever_stage_they_change(served: Served) -> None:
    listed = httpx.get(f"{served.command.url}/v1/models", timeout=60.0, trust_env=False).json()["data"]
    assert {each["id"] for each in listed} == {"smollm2", *LAYERS}, listed
    plain = answer(served, "smollm2")
    told = {name: answer(served, name) for name in LAYERS}
    assert told["nothing"] == plain, told
    assert len({plain, told["first"], told["second"]}) == 3, (plain, told)
    assert answer(served, "smollm2") == plain, "an adapter's answer leaves the model as it was"
