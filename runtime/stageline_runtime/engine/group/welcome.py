"""The engine's answer to the stages' hellos: a refusal, or the cut and the sizes for all of them at once. Pure.

It also decides once for all stages how tensors are transferred and which graphs are captured, so that no two stages
can disagree.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stageline_api.failures import FailureClass
from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.group.stage_ranks import refused_ranks
from stageline_runtime.engine.scheduling.cache_sizing import CacheSize, MemoryShortageError, size_cache
from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError
from stageline_runtime.model_facts.number_format import choose_number_format
from stageline_runtime.model_facts.rank_cut import refuse_experts, refuse_ranks
from stageline_runtime.plan_bus.challenge import is_proof
from stageline_runtime.plan_bus.messages import (
    PROTOCOL_VERSION,
    GraphMode,
    Hello,
    Measured,
    Place,
    TransportKind,
    Welcome,
)
from stageline_runtime.planning.cut import CutError, NoRoomError, cut_layers, engine_costs
from stageline_runtime.planning.memory import ELEMENT_BYTES, GroupMemory, LargestStep, StageMemory, StageRoom
from stageline_runtime.termination import RuntimeFailure


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The model that the last stage drafts with."""

    directory: Path
    config: ModelConfig


def refusal_of(hello: Hello, contract: PodContract, known: Mapping[Place, Hello], nonce: str) -> str | None:
    """Why a stage challenged with `nonce` can't join, as a sentence; None when it may. Never says the token."""
    place = Place(hello.stage, hello.rank)
    if not is_proof(hello.proof, contract.bus_token, nonce, place, hello.incarnation):
        return "the plan bus token is wrong"
    if hello.protocol != PROTOCOL_VERSION:
        return f"protocol version {hello.protocol} does not match the engine's {PROTOCOL_VERSION}"
    if hello.incarnation != contract.incarnation:
        return f"incarnation {hello.incarnation} is not this group's {contract.incarnation}"
    if hello.stage_count != contract.stage_count or not 0 <= hello.stage < contract.stage_count:
        return f"stage {hello.stage} of {hello.stage_count} has no place among {contract.stage_count}"
    if hello.ranks != contract.ranks or not 0 <= hello.rank < contract.ranks:
        return f"rank {hello.rank} of {hello.ranks} has no place among the {contract.ranks} of stage {hello.stage}"
    if place in known:
        return f"{place.words(contract.ranks)} is connected already"
    return None


def welcome_stages(
    hellos: Mapping[int, Hello],
    contract: PodContract,
    model: ModelConfig,
    model_dir: Path,
    draft: DraftModel | None = None,
    of_ranks: Collection[Hello] = (),
) -> dict[int, Welcome]:
    """Each stage's welcome, once every stage has sent its hello; the last stage also holds `draft`. `of_ranks`: the
    hellos of all ranks, where stages have several.

    Raises:
        RuntimeFailure: class BadConfig (the cut can't be made), OutOfMemory (estimated before anything is loaded,
            naming how much is missing) or ModelLoad (stages hold different weights).
    """
    config = contract.config
    check_weights(hellos, config.source)
    on_devices = _all_on_devices(hellos)
    number_format = choose_number_format(
        config.dtype, model.dtype, on_devices=on_devices, slow_cpus=_slow_cpus(of_ranks or hellos.values())
    )
    dtype, limits = number_format.dtype, config.step_limits(on_gpus=on_devices)
    _check_speculation(config, hellos, draft)
    _check_ranks(config, model)
    memory = _group_memory(hellos, config, model, dtype, draft)
    with _names_widening(dtype, model):
        layers = _cut(contract, model, memory=memory, on_devices=on_devices)
        size = _size_cache(memory.stages_of(layers), config, model, limits.max_num_seqs)
    last = contract.stage_count - 1
    hosts = [hello.host for hello in hellos.values()]
    containers = [(hello.host, hello.container) for hello in hellos.values()]
    return {
        stage: Welcome(
            first_layer=layers[stage].first,
            last_layer=layers[stage].last,
            model_dir=str(model_dir),
            dtype=dtype,
            dtype_reason=number_format.reason,
            num_cohorts=size.num_cohorts,
            num_slots=size.num_slots,
            slot_tokens=size.slot_tokens,
            max_step_tokens=limits.max_num_batched_tokens,
            stages_on_host=hosts.count(hello.host) * contract.ranks,
            stages_in_container=containers.count((hello.host, hello.container)) * contract.ranks,
            transport=choose_transport(of_ranks or hellos.values(), needs_host=config.tls is not None),
            graphs=choose_graphs(config.graphs, hellos, model, dtype=dtype, ranks=contract.ranks),
            draft_dir=str(draft.directory) if draft is not None and stage == last else "",
            layer_counts=tuple(each.count for each in layers),
        )
        for stage, hello in hellos.items()
    }


def size_loaded_cache(
    hellos: Mapping[int, Hello],
    welcomes: Mapping[int, Welcome],
    measured: Mapping[int, Measured],
    config: RuntimeConfig,
    model: ModelConfig,
    draft: DraftModel | None = None,
) -> CacheSize:
    """The cache size, from the stages' measurements, or from an estimate for a stage without one.

    Raises:
        RuntimeFailure: class OutOfMemory, naming how much is missing.
    """
    layers = tuple(LayerRange(first=each.first_layer, last=each.last_layer) for _, each in sorted(welcomes.items()))
    counted = _group_memory(hellos, config, model, welcomes[0].dtype, draft).stages_of(layers)
    stages = tuple(
        replace(stage, weight_bytes=found.held_bytes, step_bytes=found.step_bytes)
        if (found := measured.get(stage.stage)) is not None
        else stage
        for stage in counted
    )
    return _size_cache(stages, config, model, welcomes[0].num_slots)


def _all_on_devices(hellos: Mapping[int, Hello]) -> bool:
    """Whether every stage computes on a device."""
    return all(hello.device for hello in hellos.values())


def measuring_stages(hellos: Mapping[int, Hello]) -> frozenset[int]:
    """The stages that will report measurements: those on devices."""
    return frozenset(stage for stage, hello in hellos.items() if hello.device)


def welcome_supervisors(
    hellos: Mapping[int, Hello], contract: PodContract, model: ModelConfig, model_dir: Path
) -> dict[int, Welcome]:
    """Each supervisor's welcome, where the stages are nodes of another engine, which sizes its own cache.

    The cut goes by the layers' costs alone: a supervisor doesn't know the memory of the devices.

    Raises:
        RuntimeFailure: class BadConfig (the cut can't be made) or ModelLoad (stages hold different weights).
    """
    config = contract.config
    if config.tls is not None:
        detail = "spec.network.tls: what nodes of vLLM say to each other has no TLS"
        raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="check tls")
    check_weights(hellos, config.source)
    limits = config.step_limits(on_gpus=False)  # the operator decides for GPUs: a supervisor doesn't look for them
    layers = _cut(contract, model, memory=None, on_devices=True)
    hosts = [hello.host for hello in hellos.values()]
    return {
        stage: Welcome(
            first_layer=layers[stage].first,
            last_layer=layers[stage].last,
            model_dir=str(model_dir),
            dtype=choose_number_format(config.dtype, model.dtype, on_devices=True).dtype,
            num_cohorts=contract.stage_count,
            num_slots=limits.max_num_seqs,
            slot_tokens=_max_model_len(config, model),
            max_step_tokens=limits.max_num_batched_tokens,
            stages_on_host=hosts.count(hello.host),
            layer_counts=tuple(each.count for each in layers),
        )
        for stage, hello in hellos.items()
    }


def check_weights(hellos: Mapping[int, Hello], source: str) -> None:
    """Check that all stages that report a digest would load the same weights; mixed weights give meaningless tokens.

    Raises:
        RuntimeFailure: class ModelLoad, naming the first stage that differs from those before it.
    """
    first, expected = -1, ""
    for stage, hello in sorted(hellos.items()):
        if hello.weights and not expected:
            first, expected = stage, hello.weights
        elif hello.weights and hello.weights != expected:
            detail = (
                f"stage {stage} has other weights of {source} than stage {first} "
                f"(digest {hello.weights}, not {expected}): "
                "name a revision in spec.model.source, or empty the model cache that is older"
            )
            raise RuntimeFailure(FailureClass.MODEL_LOAD, detail, operation="compare weights", peer=stage)


@contextmanager
def _names_widening(dtype: str, model: ModelConfig) -> Iterator[None]:
    """If memory is short, add to the error that the model's own format needs half of it."""
    try:
        yield
    except RuntimeFailure as failure:
        if failure.failure_class is FailureClass.OUT_OF_MEMORY and ELEMENT_BYTES[dtype] > ELEMENT_BYTES[model.dtype]:
            failure.detail += f" (computing in {dtype}; spec.engine.dtype {model.dtype} needs half the memory)"
        raise


def _slow_cpus(hellos: Iterable[Hello]) -> str:
    stages = sorted({hello.stage for hello in hellos if not hello.has_bfloat16_units})
    if not stages:
        return ""
    plural = "s" if len(stages) > 1 else ""
    return f"the CPU{plural} of stage{plural} {', '.join(map(str, stages))}"


def _check_speculation(config: RuntimeConfig, hellos: Mapping[int, Hello], draft: DraftModel | None) -> None:
    """What a draft model can't run on: a device of a stage of several ranks, and, where only Hugging Face's layers run
    it, a device at all."""
    if draft is None:
        return
    last = max(hellos)
    detail = None
    on_devices = [stage for stage, hello in sorted(hellos.items()) if hello.device]
    if on_devices and config.stage_ranks > 1:
        detail = (
            "spec.engine.speculative.method draft is not built for ranks on devices yet, and "
            f"stage {on_devices[0]} has {config.stage_ranks}: use method lookup, give stages one rank, or set "
            "engine.device to cpu"
        )
    elif last in on_devices and draft.config.is_covered:
        detail = (
            f"spec.engine.speculative.draft.source: model_type {draft.config.architecture} runs through Hugging Face's "
            f"layers, and these on the CPU only, but stage {last} drafts on a device: draft with a model of the own "
            "decoder's families, or set engine.device to cpu"
        )
    if detail is not None:
        raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="check speculative")


def _check_ranks(config: RuntimeConfig, model: ModelConfig) -> None:
    tensor, experts = config.tensor_ranks, config.expert
    try:
        if tensor > 1 and experts > 1:
            raise UnsupportedModelError(f"can't be had beside spec.parallelism.tensor {tensor}")
        refuse_ranks(model, tensor)
        refuse_experts(model, experts)
    except UnsupportedModelError as error:
        raise refused_ranks(config, str(error)) from error


def _size_cache(
    stages: tuple[StageMemory, ...], config: RuntimeConfig, model: ModelConfig, max_num_seqs: int
) -> CacheSize:
    try:
        return size_cache(
            stages,
            max_num_seqs=max_num_seqs,
            max_model_len=_max_model_len(config, model),
            num_ranks=config.expert,
        )
    except MemoryShortageError as error:
        raise RuntimeFailure(FailureClass.OUT_OF_MEMORY, str(error), operation="size the cache") from error


def _max_model_len(config: RuntimeConfig, model: ModelConfig) -> int:
    return config.max_model_len or model.context_length


def _group_memory(
    hellos: Mapping[int, Hello],
    config: RuntimeConfig,
    model: ModelConfig,
    dtype: str,
    draft: DraftModel | None,
) -> GroupMemory:
    return GroupMemory(
        config=model,
        rooms=tuple(_room(hello) for _, hello in sorted(hellos.items())),
        max_model_len=_max_model_len(config, model),
        largest_step=LargestStep.of(config, on_gpus=_all_on_devices(hellos)),
        element_bytes=ELEMENT_BYTES[dtype],
        draft=None if draft is None else draft.config,
        ranks=config.tensor_ranks,
        experts=config.expert,
    )


def _room(hello: Hello) -> StageRoom:
    return StageRoom(host=memory_owner(hello), available_bytes=hello.available_bytes, is_device=bool(hello.device))


def _cut(
    contract: PodContract, model: ModelConfig, memory: GroupMemory | None, *, on_devices: bool
) -> tuple[LayerRange, ...]:
    config = contract.config
    costs = engine_costs(model, ranks=config.tensor_ranks, experts=config.expert, on_devices=on_devices)
    try:
        return cut_layers(
            model.num_layers,
            contract.stage_count,
            layer_cost=costs.layer,
            embedding_cost=costs.embedding,
            head_cost=costs.head,
            explicit=config.stage_layers,
            memory=memory,
        )
    except NoRoomError as error:
        raise RuntimeFailure(FailureClass.OUT_OF_MEMORY, str(error), operation="cut the layers") from error
    except CutError as error:
        raise RuntimeFailure(FailureClass.BAD_CONFIG, str(error), operation="cut the layers") from error


def choose_transport(hellos: Iterable[Hello], *, needs_host: bool = False) -> TransportKind:
    """`nccl` between stages, or their ranks, that have a device each; it refuses two ranks on one, so then tensors are
    staged, as they are with TLS, which NCCL has not (`needs_host`)."""
    devices = [hello.device for hello in hellos]
    if not any(devices):
        return TransportKind.HOST
    if needs_host:
        return TransportKind.STAGED
    if all(devices) and len(set(devices)) == len(devices):
        return TransportKind.NCCL
    return TransportKind.STAGED


def choose_graphs(
    asked: str, hellos: Mapping[int, Hello], model: ModelConfig, *, dtype: str, ranks: int = 1
) -> GraphMode:
    """The fullest graph mode that the group supports. `auto` selects none where a stage runs on the CPU and for a
    mixture of experts that some stage's device would wait for. It also selects none where a stage has several `ranks`,
    since their exchanges can't be captured.

    Raises:
        RuntimeFailure: class BadConfig, when graphs are requested and a stage runs on the CPU.
    """
    on_cpu = [stage for stage, hello in sorted(hellos.items()) if not hello.device]
    if asked == "auto":
        waits = model.mixture is not None and not _queues_experts(hellos, dtype)
        return GraphMode.OFF if on_cpu or waits or ranks > 1 else GraphMode.FULL
    graphs = GraphMode(asked)
    if graphs is not GraphMode.OFF and on_cpu:
        detail = (
            f"spec.engine.graphs {asked} can't be had: stage {on_cpu[0]} runs on the CPU, and graphs are captured on "
            "devices alone; set it to off or auto"
        )
        raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="choose graphs")
    return graphs


def _queues_experts(hellos: Mapping[int, Hello], dtype: str) -> bool:
    return dtype == "bfloat16" and all(hello.queues_bfloat16_experts for hello in hellos.values())


def memory_owner(hello: Hello) -> str:
    """Owner of the memory that the stage reports as `available_bytes`: stages with the same owner share it."""
    return hello.device or hello.memory or hello.host
