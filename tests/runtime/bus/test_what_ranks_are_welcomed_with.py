"""What an engine answers to the hellos of stages of several ranks: the cut, the memory, a refusal with the numbers."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from oracles.planning_models import small_llama, small_mixture, weight_bytes
from processes.played_stage import hello
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.group.stage_ranks import check_devices_of_ranks, measured_of_stages
from stageline_runtime.engine.group.welcome import DraftModel, choose_transport, welcome_stages
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.messages import GraphMode, Hello, Measured, Place, TransportKind, Welcome
from stageline_runtime.planning.memory import USABLE_DEVICE_SHARE, USABLE_SHARE, LargestStep, draft_memory
from stageline_runtime.termination import RuntimeFailure

STEP = LargestStep(tokens=64, rows=4)


def contract(**config: Any) -> PodContract:
    usual: dict[str, Any] = {
        "model_name": "tiny",
        "namespace": "lab",
        "served_name": "tiny",
        "source": "file:///models/tiny",
        "cache_dir": "/cache",
        "stage_count": 1,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": STEP.rows,
        "max_num_batched_tokens": STEP.tokens,
    }
    return PodContract(
        config=RuntimeConfig(**usual | config),
        stage=0,
        stage_count=config.get("stage_count", 1),
        group=0,
        incarnation=1,
        pod_ip="127.0.0.1",
        master_addr="127.0.0.1",
        master_port=1,
        bus_token="t",
    )


def welcomed(model: ModelConfig, hello: Hello, draft: ModelConfig | None = None, **config: Any) -> Welcome:
    drafts = None if draft is None else DraftModel(Path("/draft"), draft)
    return welcome_stages({0: hello}, contract(**config), model, Path("/models/tiny"), drafts)[0]


def refused(model: ModelConfig, hello: Hello, **config: Any) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as raised:
        welcomed(model, hello, **config)
    return raised.value


def needed_bytes(model: ModelConfig, tokens: int, draft: ModelConfig | None, experts: int) -> int:
    """What so many ranks take together: each its weights, its step and `tokens` tokens' keys and values."""
    whole = LayerRange(first=0, last=model.num_layers - 1)
    held = weight_bytes(model, whole, is_first=True, is_last=True, element_bytes=2, experts=experts)
    step = STEP.bytes_of(model, is_last=True, element_bytes=2, experts=experts)
    token = model.kv_bytes_per_token(model.num_layers, 2)
    if draft is not None:
        beside = draft_memory(draft, STEP, 2)
        held, step, token = held + beside.weight_bytes, max(step, beside.step_bytes), token + beside.token_bytes
    return experts * (held + step + tokens * token)


def with_memory(available_bytes: int) -> Hello:
    return hello(stage_count=1, available_bytes=available_bytes)


@pytest.mark.parametrize("draft", [None, small_llama(2)], ids=["alone", "with-a-draft-model"])
@pytest.mark.parametrize("experts", [1, 2, 8])
def test_ranks_of_experts_need_their_weights_and_steps_and_a_sequence_each(
    experts: int, draft: ModelConfig | None
) -> None:
    """With a page less than that there is no group, whatever the number of ranks."""
    model = small_mixture(2)
    needed = needed_bytes(model, 2048, draft, experts)
    enough = with_memory(int(needed / USABLE_SHARE) + 2)
    welcome = welcomed(model, enough, draft, expert=experts)
    assert (welcome.last_layer, welcome.slot_tokens, welcome.num_slots) == (1, 2048, STEP.rows)
    assert (welcome.stages_on_host, welcome.stages_in_container) == (experts, experts), "who share the cores"
    with pytest.raises(RuntimeFailure) as raised:
        welcomed(model, with_memory(enough.available_bytes - 4096), draft, expert=experts)
    assert raised.value.failure_class is FailureClass.OUT_OF_MEMORY, raised.value


@pytest.mark.parametrize("draft", [None, small_llama(2)], ids=["alone", "with-a-draft-model"])
def test_ranks_that_share_layers_hold_a_sequence_together(draft: ModelConfig | None) -> None:
    """And one draft model, which is the first one's."""
    model = small_llama(4)
    whole = LayerRange(first=0, last=3)
    held = 2 * weight_bytes(model, whole, is_first=True, is_last=True, element_bytes=2, ranks=2)
    step = 2 * STEP.bytes_of(model, is_last=True, element_bytes=2, ranks=2)
    token = model.kv_bytes_per_token(4, 2)
    if draft is not None:
        beside = draft_memory(draft, STEP, 2)
        held, step, token = held + beside.weight_bytes, max(step, beside.step_bytes), token + beside.token_bytes
    enough = with_memory(int((held + step + 256 * token) / USABLE_SHARE) + 2)
    assert welcomed(model, enough, draft, tensor=2, max_model_len=256).stages_on_host == 2
    with pytest.raises(RuntimeFailure) as raised:
        welcomed(model, with_memory(enough.available_bytes - 4096), draft, tensor=2, max_model_len=256)
    assert raised.value.failure_class is FailureClass.OUT_OF_MEMORY, raised.value


@pytest.mark.parametrize(
    ("model", "config", "detail"),
    [
        pytest.param(
            small_mixture(2),
            {"expert": 3},
            "spec.parallelism.expert 3: the model's 128 experts a layer can't be divided among 3 ranks",
            id="numbers",
        ),
        pytest.param(
            small_llama(2),
            {"expert": 2},
            "spec.parallelism.expert 2: model_type 'llama' has no experts in any layer that could be cut over 2 ranks",
            id="dense",
        ),
        pytest.param(
            small_mixture(2),
            {"expert": 2, "tensor": 2},
            "spec.parallelism.expert 2: can't be had beside spec.parallelism.tensor 2",
            id="both",
        ),
        pytest.param(
            small_llama(2),
            {"tensor": 3},
            "spec.parallelism.tensor 3: the model's 4 query heads and 2 key and value heads and 128 feed-forward "
            "columns and 64 hidden elements can't be divided among 3 ranks",
            id="heads",
        ),
    ],
)
def test_what_ranks_can_not_share_is_a_bad_config_with_the_numbers(
    model: ModelConfig, config: dict[str, int], detail: str
) -> None:
    failure = refused(model, with_memory(1 << 40), **config)
    assert (failure.failure_class, failure.detail) == (FailureClass.BAD_CONFIG, detail)


def on_device(rank: int, device: str, **changes: Any) -> Hello:
    return hello(stage_count=1, rank=rank, ranks=2, device=device, **changes)


@pytest.mark.parametrize("field", ["tensor", "expert"])
def test_a_device_is_filled_by_one_rank_alone(field: str) -> None:
    """Of a token's keys and values it takes its heads, where heads are cut."""
    model = small_llama(4) if field == "tensor" else small_mixture(2)
    counts = {"ranks": 2} if field == "tensor" else {"experts": 2}
    whole = LayerRange(first=0, last=model.num_layers - 1)
    held = weight_bytes(model, whole, is_first=True, is_last=True, element_bytes=2, **counts)
    step = STEP.bytes_of(model, is_last=True, element_bytes=2, **counts)
    token = model.kv_bytes_per_token(model.num_layers, 2) // (2 if field == "tensor" else 1)
    enough = on_device(0, "gpu-0", available_bytes=int((held + step + 256 * token) / USABLE_DEVICE_SHARE) + 2)
    settings: dict[str, Any] = {field: 2, "max_model_len": 256}
    welcome = welcomed(model, enough, **settings)
    assert (welcome.graphs, welcome.transport) == (GraphMode.OFF, TransportKind.NCCL), "exchanges are not captured"
    short = msgspec.structs.replace(enough, available_bytes=enough.available_bytes - 4096)
    assert refused(model, short, **settings).failure_class is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("devices", "rule"),
    [
        (("gpu-0", "gpu-1"), None),
        (("", ""), None),
        (("gpu-0", "gpu-0"), "ranks 0 and 1 of stage 0 share gpu-0, and NCCL takes one rank a device"),
        (
            ("gpu-0", ""),
            "rank 0 of stage 0 has a device and rank 1 has none: give the stage one for each rank "
            "(resources nvidia.com/gpu), or set engine.device to cpu",
        ),
        (
            ("", "gpu-0"),
            "rank 1 of stage 0 has a device and rank 0 has none: give the stage one for each rank "
            "(resources nvidia.com/gpu), or set engine.device to cpu",
        ),
    ],
)
def test_ranks_of_a_stage_have_a_device_each_or_none_has_one(devices: tuple[str, str], rule: str | None) -> None:
    hellos = {Place(0, rank): on_device(rank, device) for rank, device in enumerate(devices)}
    config = contract(tensor=2).config
    if rule is None:
        check_devices_of_ranks(hellos, config)
        return
    with pytest.raises(RuntimeFailure) as raised:
        check_devices_of_ranks(hellos, config)
    told = (raised.value.failure_class, raised.value.detail)
    assert told == (FailureClass.BAD_CONFIG, f"spec.parallelism.tensor 2: {rule}")


def test_lanes_go_by_nccl_only_where_no_two_ranks_of_any_stage_share_a_device() -> None:
    crossed = [hello(stage=stage, rank=rank, device=f"gpu-{(stage + rank) % 2}") for stage in (0, 1) for rank in (0, 1)]
    assert choose_transport(crossed) is TransportKind.STAGED
    apart = [hello(stage=stage, rank=rank, device=f"gpu-{2 * stage + rank}") for stage in (0, 1) for rank in (0, 1)]
    assert choose_transport(apart) is TransportKind.NCCL


def test_a_stage_has_measured_what_the_rank_with_most_has() -> None:
    measured = {
        Place(0, 1): Measured(0, held_bytes=5, step_bytes=7),
        Place(0, 0): Measured(0, held_bytes=9, step_bytes=2),
        Place(1, 0): Measured(1, held_bytes=1, step_bytes=1),
    }
    assert measured_of_stages(measured) == {0: Measured(0, 9, 7), 1: Measured(1, 1, 1)}
    assert measured_of_stages(dict(reversed(measured.items()))) == {0: Measured(0, 9, 7), 1: Measured(1, 1, 1)}


@pytest.mark.parametrize(
    ("devices", "limits"),
    [(("", ""), (16, 512)), (("gpu-0", "gpu-1"), (256, 8192)), (("gpu-0", ""), (16, 512))],
    ids=["cpus", "gpus", "mixed"],
)
def test_limits_that_are_not_set_follow_what_stages_found(devices: tuple[str, ...], limits: tuple[int, int]) -> None:
    unset = contract(stage_count=2, max_num_seqs=None, max_num_batched_tokens=None)
    hellos = {
        stage: hello(stage=stage, stage_count=2, device=device, available_bytes=1 << 40)
        for stage, device in enumerate(devices)
    }
    welcomes = welcome_stages(hellos, unset, small_llama(4), Path("/models/tiny"))
    assert {(each.num_slots, each.max_step_tokens) for each in welcomes.values()} == {limits}
