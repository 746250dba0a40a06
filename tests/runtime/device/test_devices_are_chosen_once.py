"""Which device a stage takes, and what follows for its group, is decided in one place and said plainly."""

import os
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from processes.transport_ends import transport_contract
from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.cuda import CudaAccelerator, choose_accelerator
from stageline_runtime.engine.group.welcome import choose_graphs, choose_transport, memory_owner
from stageline_runtime.model_facts.model_config import ModelConfig, model_config_from_dict
from stageline_runtime.plan_bus.messages import PROTOCOL_VERSION, GraphMode, Hello, TransportKind
from stageline_runtime.stage.devices import Devices
from stageline_runtime.stage.process import StageProcess
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


def hello(stage: int, device: str, *, queues_bfloat16_experts: bool = False) -> Hello:
    return Hello(
        PROTOCOL_VERSION,
        stage,
        2,
        1,
        "proof",
        "host",
        1 << 33,
        "http://127.0.0.1:9100",
        device,
        queues_bfloat16_experts=queues_bfloat16_experts,
    )


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
    """With TLS."""
    assert choose_transport(hellos(*devices), needs_host=True) is TransportKind.STAGED


@pytest.mark.parametrize(
    ("asked", "devices", "fields", "graphs"),
    [
        ("auto", ("a", "b"), LLAMA, GraphMode.FULL),
        ("auto", ("a", ""), LLAMA, GraphMode.OFF),
        ("auto", ("", ""), LLAMA, GraphMode.OFF),
        ("auto", ("a", "b"), QWEN3_MOE, GraphMode.OFF),
        ("full", ("a", "b"), QWEN3_MOE, GraphMode.FULL),
        ("piecewise", ("a", "b"), LLAMA, GraphMode.PIECEWISE),
        ("off", ("", ""), LLAMA, GraphMode.OFF),
        ("off", ("a", "b"), LLAMA, GraphMode.OFF),
    ],
)
def test_auto_captures_where_all_stages_have_a_device(
    asked: str, devices: tuple[str, ...], fields: dict[str, object], graphs: GraphMode
) -> None:
    model: ModelConfig = model_config_from_dict(fields, {})
    assert choose_graphs(asked, dict(enumerate(hellos(*devices))), model, dtype="bfloat16") is graphs


@pytest.mark.parametrize(
    ("queues", "dtype", "ranks", "graphs"),
    [
        ((True, True), "bfloat16", 1, GraphMode.FULL),
        ((True, False), "bfloat16", 1, GraphMode.OFF),
        ((False, True), "bfloat16", 1, GraphMode.OFF),
        ((True, True), "float32", 1, GraphMode.OFF),
        ((True, True), "float16", 1, GraphMode.OFF),
        ((True, True), "bfloat16", 2, GraphMode.OFF),
    ],
)
def test_auto_captures_a_mixture_where_no_device_is_waited_for(
    queues: tuple[bool, ...], dtype: str, ranks: int, graphs: GraphMode
) -> None:
    model: ModelConfig = model_config_from_dict(QWEN3_MOE, {})
    said = {stage: hello(stage, f"d{stage}", queues_bfloat16_experts=each) for stage, each in enumerate(queues)}
    assert choose_graphs("auto", said, model, dtype=dtype, ranks=ranks) is graphs


@pytest.mark.parametrize(
    ("capability", "dtype", "queues"),
    [
        ((9, 0), torch.bfloat16, True),
        ((10, 0), torch.bfloat16, True),
        ((10, 3), torch.bfloat16, True),
        ((9, 0), torch.float16, False),
        ((9, 0), torch.float32, False),
        ((8, 0), torch.bfloat16, False),
        ((8, 9), torch.bfloat16, False),
        ((11, 0), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, False),
    ],
)
def test_experts_are_queued_where_torch_has_one_kernel_for_them(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, queues: bool
) -> None:
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, uuid="GPU-1", name="a"
    )
    for name, value in {
        "set_device": None,
        "Stream": object(),
        "set_stream": None,
        "get_device_properties": properties,
        "get_device_name": "a",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=value, **__: answer)
    assert CudaAccelerator().queues_experts(dtype) is queues


@pytest.mark.parametrize("asked", ["piecewise", "full"])
@pytest.mark.parametrize(("devices", "stage"), [(("", ""), 0), (("a", ""), 1), (("", "a"), 0)])
def test_graphs_asked_for_where_a_stage_has_no_device_are_refused_by_name(
    asked: str, devices: tuple[str, ...], stage: int
) -> None:
    model: ModelConfig = model_config_from_dict(LLAMA, {})
    with pytest.raises(RuntimeFailure) as refused:
        choose_graphs(asked, dict(enumerate(hellos(*devices))), model, dtype="bfloat16")
    assert refused.value.failure_class is FailureClass.BAD_CONFIG
    assert f"spec.engine.graphs {asked} can't be had: stage {stage} runs on the CPU" in str(refused.value)


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


class DeviceAskedForError(Exception):
    """The stage has come to its device."""


@pytest.mark.parametrize(("stage_count", "expected"), [(1, None), (2, "EAGER")])
def test_a_stage_with_peers_loads_all_kernels_before_it_meets_them(
    stage_count: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone one saves the seconds: it has no peer whose kernel could wait for one that is being loaded."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    found: list[str | None] = []

    def choose(_asked: str) -> NoReturn:
        found.append(os.environ.get("CUDA_MODULE_LOADING"))
        raise DeviceAskedForError

    contract = transport_contract(0, 5.0, stage_count=stage_count)
    with pytest.raises(DeviceAskedForError):
        StageProcess(contract, devices=Devices(choose=choose))._live()
    assert found == [expected]
