"""Local replacements: the image, the model cache and the Hub token's Secret."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from stageline_api import env
from stageline_api.errors import UserError
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_local.node.images import LocalImages
from stageline_operator.planner.types import PodHost

LOCAL_IMAGE: Final = "stageline:local"
"""Stands for this installation; the process node can't run other images."""
THREADS: Final = "OMP_NUM_THREADS"
THIS_MACHINE: Final = PodHost(gpu_resource="", root_is_read_only=False)
"""Local processes have the user's home, and see the machine's devices without requesting them."""


def with_cache(model: PipelineModel, cache_dir: Path) -> PipelineModel:
    """The model with `cache_dir` as its cache, unless it names one."""
    if model.spec.model.cache.host_path is not None:
        return model
    manifest = model.to_manifest()
    manifest["spec"]["model"]["cache"] = {"hostPath": str(cache_dir.absolute())}
    return PipelineModel.model_validate(manifest)


def with_local_engine(model: PipelineModel) -> PipelineModel:
    """The model without an engine image: locally vLLM is an interpreter (`STAGELINE_VLLM_PYTHON`)."""
    return model if model.spec.engine.image is None else _without(model, "engine", "image")


def without_gang(model: PipelineModel) -> PipelineModel:
    """The model without a gang scheduler: one machine has none, and fits either every stage or none."""
    return model if model.spec.placement.gang is None else _without(model, "placement", "gang")


def without_tls(model: PipelineModel) -> PipelineModel:
    """The model without TLS between its pods: all of them are on loopback."""
    return model if model.spec.network.tls is None else _without(model, "network", "tls")


def _without(model: PipelineModel, part: str, field: str) -> PipelineModel:
    manifest = model.to_manifest()
    del manifest["spec"][part][field]
    return PipelineModel.model_validate(manifest)


def refuse_no_groups(model: PipelineModel) -> None:
    """Raise `UserError` for a model without groups: local mode has no autoscaler."""
    if model.spec.replicas == 0:
        rule = "it serves nothing, and only a cluster has an autoscaler that changes it"
        raise UserError(f"spec.replicas: 0 is not allowed here: {rule}", 2)


def with_shared_machine(images: LocalImages, model: PipelineModel) -> LocalImages:
    """The same images for several groups on this machine: each gets its share of the cores and of the memory.

    A stage only counts the stages of its own group. Several groups with one thread per core each would wait for each
    other most of the time. With a cache of all free memory each, they would run out of memory.
    """
    groups = model.spec.replicas
    if groups < 2:
        return images
    stages = groups * model.spec.parallelism.pipeline
    threads = max(1, len(os.sched_getaffinity(0)) // stages)
    parts = {THREADS: str(threads), env.GROUPS_ON_MACHINE: str(groups)}
    return replace(images, env={**parts, **images.env})


def token_secret(model: PipelineModel, environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The Secret that `tokenSecretRef` names, from the caller's environment; raises `UserError` if it isn't set."""
    reference = model.spec.model.token_secret_ref
    if reference is None:
        return None
    token = environ.get(env.HF_TOKEN)
    if not token:
        raise UserError(
            f"spec.model.tokenSecretRef names the Secret {reference.name!r}, which `stageline up` reads from the "
            f"environment variable {env.HF_TOKEN}: set it and try again"
        )
    metadata = {"name": reference.name, "namespace": model.namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {reference.key: token}}
