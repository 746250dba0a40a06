"""What each container of a stage pod asks for, and may use at most.

Devices belong to the stage alone. A quota counts every container, and refuses a pod of which one says nothing: so where
the stage names an amount of CPU or memory, `prepare` and `engine` name one too, unless the template does.
"""

from typing import Any, Final

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.pods.pod import ResourcesSpec
from stageline_api.resource.pods.pod_template import claims_devices
from stageline_api.resource.quantities import parse_quantity
from stageline_api.resource.stage_pods import GPU_RESOURCE
from stageline_api.runtime_config import StepLimits

COUNTED: Final[tuple[str, ...]] = ("cpu", "memory", "ephemeral-storage")
"""Resources that every container takes of its node; a quota may be about each."""

ENGINE_REQUESTS: Final = {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "256Mi"}
ENGINE_LIMITS: Final = {"cpu": "2", "memory": "2Gi", "ephemeral-storage": "1Gi"}
"""The engine's own where nobody gives others: tokenizers of 150 000 entries and 64 answers at once hold 0.5 GiB."""


def stage_resources(model: PipelineModel, stage: int, gpu_resource: str) -> dict[str, Any]:
    """What the spec names, an RDMA device and GPUs where it asks for them without naming how many."""
    named = _named(_spec_of_stage(model, stage))
    if model.spec.network.rdma_resource is not None:
        named["limits"].setdefault(model.spec.network.rdma_resource, "1")
    # Whoever names one of the vendor's devices (a slice of a GPU, a shared one) has said which it shall be.
    is_named = bool(_vendor_amounts(named, gpu_resource))
    claims = claims_devices(model.spec.template.pod_template)
    if gpu_resource and model.spec.engine.device == "cuda" and not is_named and not claims:
        named["limits"][gpu_resource] = str(model.spec.parallelism.devices_per_stage)
    return _given(named)


def requests_gpus(model: PipelineModel, stage: int, gpu_resource: str) -> bool:
    """Whether the stage runs on GPUs: `device: cuda`, or a resource of the GPUs' vendor whose amount is not 0.

    A resource is the only sign under vLLM, which takes no `device`, and with `device: auto`.
    """
    engine = model.spec.engine
    if engine.device == "cpu":
        return False
    amounts = _vendor_amounts(_named(_spec_of_stage(model, stage)), gpu_resource)
    return engine.device == "cuda" or any(parse_quantity(amount) > 0 for amount in amounts)


def find_step_limits(model: PipelineModel) -> StepLimits | None:
    """The limits of a group, by the GPUs that its stages request; None where stages with `device: auto` and none
    requested look for a GPU themselves."""
    engine, stages = model.spec.engine, range(model.spec.parallelism.pipeline)
    on_gpus = all(requests_gpus(model, stage, GPU_RESOURCE) for stage in stages)
    if not on_gpus and engine.name == "stageline" and engine.device == "auto":
        return None
    return StepLimits.of(engine.max_num_seqs, engine.max_num_batched_tokens, on_gpus=on_gpus)


def prepare_resources(model: PipelineModel, stage: int) -> dict[str, Any]:
    """By default the stage's, without its devices: it runs before the stage, so that the pod needs no more for it."""
    given = model.spec.template.prepare_resources
    if given is not None:
        return _given(_named(given))
    named = _named(_spec_of_stage(model, stage))
    return _given({kind: {name: named[kind][name] for name in COUNTED if name in named[kind]} for kind in named})


def engine_resources(model: PipelineModel, stage: int) -> dict[str, Any]:
    """By default an amount of its own for each resource of which the stage names one.

    A limit is asked for as a whole where the stage does that too, so that the pod's quality of service stays
    Guaranteed.
    """
    given = model.spec.template.engine_resources
    if given is not None:
        return _given(_named(given))
    of_stage = _spec_of_stage(model, stage)
    limits = {name: ENGINE_LIMITS[name] for name in COUNTED if name in of_stage.limits}
    asked = [name for name in COUNTED if name in of_stage.requests]
    requests = {name: ENGINE_REQUESTS[name] for name in asked if of_stage.requests[name] != of_stage.limits.get(name)}
    return _given({"requests": requests, "limits": limits})


def _spec_of_stage(model: PipelineModel, stage: int) -> ResourcesSpec:
    override = model.spec.stages[stage].resources if model.spec.stages else None
    return model.spec.template.resources if override is None else override


def _vendor_amounts(named: dict[str, dict[str, str]], gpu_resource: str) -> list[str]:
    """Amounts of all resources of the GPUs' vendor: whole GPUs, slices such as `nvidia.com/mig-3g.40gb`, shares."""
    vendor = gpu_resource.partition("/")[0]
    return [amount for amounts in named.values() for name, amount in amounts.items() if name.startswith(f"{vendor}/")]


def _named(resources: ResourcesSpec) -> dict[str, dict[str, str]]:
    return {"requests": dict(resources.requests), "limits": dict(resources.limits)}


def _given(named: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {kind: amounts for kind, amounts in named.items() if amounts}
