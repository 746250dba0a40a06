"""Which device a stage takes, and what follows for its group, is decided in one place and said plainly."""

from typing import Literal

import pytest
import torch

from stageline_api.failures import FailureClass
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.accelerator.cuda import choose_accelerator
from stageline_runtime.engine.group.welcome import choose_graphs, choose_transport, memory_owner, tells_promptly
from stageline_runtime.model_facts.model_config import ModelConfig, model_config_from_dict
from stageline_runtime.plan_bus.messages import PROTOCOL_VERSION, GraphMode, Hello, TransportKind
from stageline_runtime.termination import RuntimeFailure

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "head_dim": 16,
}


def hello(stage: int, device: str) -> Hello:
    return Hello(PROTOCOL_VERSION, stage, 2, 1, "proof", "host", 1 << 33, "http://127.0.0.1:9100", device)


def hellos(*devices: str) -> list[Hello]:
    return [hello(stage, device) for stage, device in enumerate(devices)]


@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        pytest.param(("", ""), TransportKind.HOST, id="CPUs"),
        pytest.param(("H200 a", "H200 b"), TransportKind.NCCL, id="a device each"),
        pytest.param(("H200 a", "H200 a"), TransportKind.STAGED, id="a shared device"),
        pytest.param(("H200 a", "H200 b", "H200 a"), TransportKind.STAGED, id="two of three share"),
        pytest.param(("H200 a", ""), TransportKind.STAGED, id="a device and a CPU"),
    ],
)
def test_tensors_cross_as_the_devices_allow(devices: tuple[str, ...], kind: TransportKind) -> None:
    assert choose_transport(hellos(*devices)) is kind


@pytest.mark.parametrize("devices", [("H200 a", "H200 b"), ("H200 a", "")])
def test_what_needs_host_memory_is_staged_wherever_there_is_a_device(devices: tuple[str, ...]) -> None:
    """With TLS, or where gloo is asked for."""
    assert choose_transport(hellos(*devices), needs_host=True) is TransportKind.STAGED


@pytest.mark.parametrize(
    ("devices", "transport", "promptly"),
    [
        (("", ""), "gloo", True),
        (("a", "b"), "auto", True),
        (("a", "a"), "auto", True),
        (("a", ""), "auto", True),
        (("a", "b"), "gloo", False),
        (("a", ""), "gloo", False),
    ],
)
def test_tokens_of_devices_are_told_late_only_where_gloo_carries_tensors(
    devices: tuple[str, ...], transport: Literal["auto", "gloo"], promptly: bool
) -> None:
    config = RuntimeConfig(
        model_name="m",
        namespace="n",
        served_name="s",
        source="file:///m",
        cache_dir="/c",
        stage_count=len(devices),
        transport=transport,
    )
    assert tells_promptly(hellos(*devices), config) is promptly


@pytest.mark.parametrize(
    ("asked", "devices", "fields", "graphs"),
    [
        ("auto", ("a", "b"), LLAMA, GraphMode.FULL),
        ("auto", ("a", ""), LLAMA, GraphMode.OFF),
        ("auto", ("", ""), LLAMA, GraphMode.OFF),
        ("auto", ("a", "b"), QWEN3_MOE, GraphMode.OFF),
        ("full", ("a", "b"), QWEN3_MOE, GraphMode.FULL),
        ("piecewise", ("", ""), LLAMA, GraphMode.PIECEWISE),
        ("off", ("a", "b"), LLAMA, GraphMode.OFF),
    ],
)
def test_auto_captures_where_all_stages_have_a_device(
    asked: str, devices: tuple[str, ...], fields: dict[str, object], graphs: GraphMode
) -> None:
    model: ModelConfig = model_config_from_dict(fields, {})
    assert choose_graphs(asked, hellos(*devices), model) is graphs


def test_stages_that_share_a_device_share_its_memory_and_cpus_their_hosts() -> None:
    assert memory_owner(hello(0, "H200 a")) == memory_owner(hello(1, "H200 a")) == "H200 a"
    assert memory_owner(hello(0, "")) == "host"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_device_that_is_not_there_is_a_bad_configuration() -> None:
    assert choose_accelerator("auto") is None
    assert choose_accelerator("cpu") is None
    with pytest.raises(RuntimeFailure) as refused:
        choose_accelerator("cuda")
    assert refused.value.failure_class is FailureClass.BAD_CONFIG
    assert "spec.engine.device is cuda, but " in refused.value.detail
    assert "nvidia.com/gpu" in refused.value.detail
