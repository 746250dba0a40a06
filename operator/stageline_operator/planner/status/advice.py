"""What a spec leaves to defaults that a person may not expect in a cluster."""

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.pods.pod_template import claims_devices
from stageline_api.resource.serving.model_source import HubSource, PackageSource
from stageline_operator.planner.objects.pod_resources import requests_gpus


def give_advice(model: PipelineModel, gpu_resource: str) -> str:
    """Which stages use CPUs without being asked to, and that a download ends with its pod; empty if neither."""
    return "; ".join(each for each in (_cpu_advice(model, gpu_resource), _cache_advice(model)) if each)


def _cpu_advice(model: PipelineModel, gpu_resource: str) -> str:
    engine, count = model.spec.engine, model.spec.parallelism.pipeline
    sees_all_devices = not gpu_resource or claims_devices(model.spec.template.pod_template)
    if engine.name == "vllm" or engine.device != "auto" or sees_all_devices:
        return ""
    on_cpus = [stage for stage in range(count) if not requests_gpus(model, stage, gpu_resource)]
    if not on_cpus:
        return ""
    where = "any stage" if len(on_cpus) == count else f"stages {', '.join(map(str, on_cpus))}"
    return (
        f"no GPU is requested for {where}, so CPUs are used: set spec.engine.device to cuda, or to cpu if that is meant"
    )


def _cache_advice(model: PipelineModel) -> str:
    cache = model.spec.model.cache
    is_kept = cache.host_path or cache.claim_name or cache.claim_template
    if is_kept or not isinstance(model.spec.model.parsed_source, HubSource | PackageSource):
        return ""
    return "every new pod downloads the model again: set spec.model.cache to keep it"
