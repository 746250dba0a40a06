"""What an engine answers where the last stage drafts on a device: the memory of both models, or a refusal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oracles.planning_models import small_llama, small_mixture, weight_bytes
from processes.played_stage import hello
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import LayerRange, RuntimeConfig, SpeculativeConfig
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.group.welcome import DraftModel, size_loaded_cache, welcome_stages
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.messages import GraphMode, Hello, Measured, Welcome
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.planning.memory import USABLE_DEVICE_SHARE, LargestStep, draft_memory
from stageline_runtime.termination import RuntimeFailure

MAX_MODEL_LEN = 256
DRAFT = small_llama(2)


def contract(stage_count: int = 1, **config: Any) -> PodContract:
    usual: dict[str, Any] = {
        "model_name": "tiny",
        "namespace": "lab",
        "served_name": "tiny",
        "source": "file:///models/tiny",
        "cache_dir": "/cache",
        "stage_count": stage_count,
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "speculative": SpeculativeConfig(draft_source="file:///draft"),
    }
    return PodContract(
        config=RuntimeConfig(**usual | config),
        stage=0,
        stage_count=stage_count,
        group=0,
        incarnation=1,
        pod_ip="127.0.0.1",
        master_addr="127.0.0.1",
        master_port=1,
        bus_token="t",
    )


def welcomed(
    hellos: dict[int, Hello], model: ModelConfig, draft: ModelConfig = DRAFT, **config: Any
) -> dict[int, Welcome]:
    given = DraftModel(Path("/draft"), draft)
    return welcome_stages(hellos, contract(len(hellos), **config), model, Path("/models/tiny"), given)


def on_device(stage: int = 0, stage_count: int = 1, **changes: Any) -> Hello:
    usual: dict[str, Any] = {"device": f"gpu-{stage}", "available_bytes": 1 << 40}
    return hello(stage=stage, stage_count=stage_count, **usual | changes)


def refusal_of(model: ModelConfig, draft: ModelConfig = DRAFT, **config: Any) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as raised:
        welcomed({0: on_device()}, model, draft, **config)
    return raised.value


def test_a_device_has_to_hold_both_models() -> None:
    model, step = small_llama(4), LargestStep.of(contract().config, on_gpus=True)
    whole = LayerRange(first=0, last=3)
    beside = draft_memory(DRAFT, step, 2)
    held = weight_bytes(model, whole, is_first=True, is_last=True, element_bytes=2) + beside.weight_bytes
    largest = max(step.bytes_of(model, is_last=True, element_bytes=2), beside.step_bytes)
    tokens = MAX_MODEL_LEN * (model.kv_bytes_per_token(4, 2) + beside.token_bytes)
    enough = on_device(available_bytes=int((held + largest + tokens) / USABLE_DEVICE_SHARE) + 2)
    welcome = welcomed({0: enough}, model)[0]
    assert (welcome.draft_dir, welcome.graphs) == ("/draft", GraphMode.FULL)
    short = msgspec.structs.replace(enough, available_bytes=enough.available_bytes - 4096)
    with pytest.raises(RuntimeFailure) as raised:
        welcomed({0: short}, model)
    assert raised.value.failure_class is FailureClass.OUT_OF_MEMORY, raised.value


def test_each_block_of_the_measured_cache_has_the_draft_models_keys_on_the_last_stage() -> None:
    """The first stage has room for ten times as many."""
    model = small_llama(4)
    hellos = {0: on_device(0, 2, available_bytes=1 << 30), 1: on_device(1, 2, available_bytes=1 << 24)}
    welcomes = welcomed(hellos, model)
    assert [welcomes[stage].draft_dir for stage in (0, 1)] == ["", "/draft"]
    layers = welcomes[1].last_layer - welcomes[1].first_layer + 1
    block = BLOCK_TOKENS * (model.kv_bytes_per_token(layers, 2) + DRAFT.kv_bytes_per_token(2, 2))
    usable = int((1 << 24) * USABLE_DEVICE_SHARE)
    measured = {0: Measured(0, 0, 0), 1: Measured(1, usable - 20 * block - block // 2 - 1000, 1000)}
    draft = DraftModel(Path("/draft"), DRAFT)
    size = size_loaded_cache(hellos, welcomes, measured, contract(2).config, model, draft)
    assert size.num_blocks == 20


@pytest.mark.parametrize("field", ["tensor", "expert"])
def test_ranks_on_devices_are_refused(field: str) -> None:
    model = small_llama(4) if field == "tensor" else small_mixture(2)
    failure = refusal_of(model, DRAFT, **{field: 2})
    assert (failure.failure_class, failure.detail) == (
        FailureClass.BAD_CONFIG,
        "spec.engine.speculative.method draft is not built for ranks on devices yet, and stage 0 has 2: use method "
        "lookup, give stages one rank, or set engine.device to cpu",
    )


def test_a_draft_model_that_only_hugging_faces_layers_can_run_is_refused_on_a_device() -> None:
    covered = replace(DRAFT, architecture="odd", is_covered=True)
    failure = refusal_of(small_llama(4), covered)
    assert (failure.failure_class, failure.detail) == (
        FailureClass.BAD_CONFIG,
        "spec.engine.speculative.draft.source: model_type odd runs through Hugging Face's layers, and these on the CPU "
        "only, but stage 0 drafts on a device: draft with a model of the own decoder's families, or set engine.device "
        "to cpu",
    )
