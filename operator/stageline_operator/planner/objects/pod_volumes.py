"""Volumes of a stage pod and their mount paths.

The root file system is read-only, so containers write only to these volumes. Compiled kernels use a separate directory
on the model cache's volume: they live as long as the cache, and a stage that may not write models can write them.
"""

from pathlib import PurePosixPath
from typing import Any, assert_never

from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.pods.template import VolumeSpec
from stageline_api.resource.serving.model import CacheSpec
from stageline_api.resource.serving.model_source import ClaimSource, FileSource, HubSource, ImageSource, PackageSource
from stageline_api.runtime_config import COMPILED_SUBDIRECTORY
from stageline_operator.planner.objects.config import CACHE_DIR, COMPILED_DIR, CONFIG_DIR, SOURCE_DIR, TLS_DIR
from stageline_operator.planner.objects.identity import config_map_name
from stageline_operator.planner.objects.vllm_stage import files_volume


def pod_volumes(model: PipelineModel, revision: str, carries_files: bool, cache_claim: str) -> list[dict[str, Any]]:
    """The pod's volumes: Stageline's own, the model's source if it is a volume, and those of the template.

    `cache_claim` is the claim that the operator creates for this stage, if the model asks for one.
    """
    tls = model.spec.network.tls
    return [
        {"name": "config", "configMap": {"name": config_map_name(model, revision)}},
        {"name": "cache", **_cache(model.spec.model.cache, cache_claim)},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": model.spec.template.shared_memory_size}},
        *([files_volume()] if carries_files else []),
        *({"name": "source", **source} for source in [_source_volume(model)] if source is not None),
        *({"name": "stageline-draft", **_directory(path)} for path in [_draft_directory(model)] if path is not None),
        *([{"name": "stageline-tls", "secret": {"secretName": tls.secret_name}}] if tls is not None else []),
        *({"name": each.name, **_template_volume(each)} for each in model.spec.template.volumes),
    ]


def container_mounts(
    model: PipelineModel, *, writes_cache: bool, compiles: bool, connects: bool
) -> list[dict[str, Any]]:
    """The volume mounts of a container. The cache is read-only unless the container fetches files into it. Containers
    that connect to other pods of the model get the model's certificate.
    """
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "cache", "mountPath": CACHE_DIR, "readOnly": not writes_cache},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if compiles:
        # `stageline prepare` creates the directory: one that a kubelet creates for a subPath belongs to root.
        mounts.append({"name": "cache", "mountPath": COMPILED_DIR, "subPath": COMPILED_SUBDIRECTORY})
    if connects and model.spec.network.tls is not None:
        mounts.append({"name": "stageline-tls", "mountPath": TLS_DIR, "readOnly": True})
    match model.spec.model.parsed_source:
        case FileSource(path=path):
            # Mounted at its own path, so that the source is the same path inside and outside.
            mounts.append({"name": "source", "mountPath": path, "readOnly": True})
        case ClaimSource() | ImageSource():
            mounts.append({"name": "source", "mountPath": SOURCE_DIR, "readOnly": True})
        case HubSource() | PackageSource():
            pass
        case source:
            assert_never(source)
    if (draft := _draft_directory(model)) is not None:
        mounts.append({"name": "stageline-draft", "mountPath": draft, "readOnly": True})
    for each in model.spec.template.volumes:
        mounts.append({"name": each.name, "mountPath": each.mount_path, "readOnly": each.read_only})
    return mounts


def _cache(cache: CacheSpec, own_claim: str) -> dict[str, Any]:
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    if cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    if cache.claim_template is not None:
        return {"persistentVolumeClaim": {"claimName": own_claim}}
    return {"emptyDir": {} if cache.size_limit is None else {"sizeLimit": cache.size_limit}}


def _source_volume(model: PipelineModel) -> dict[str, Any] | None:
    match model.spec.model.parsed_source:
        case FileSource(path=path):
            return _directory(path)
        case ClaimSource(claim=claim):
            return {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        case ImageSource(reference=reference):
            return {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
        case HubSource() | PackageSource():
            return None
        case source:
            assert_never(source)


def _draft_directory(model: PipelineModel) -> str | None:
    """The node's directory with the draft model, if no other volume mounts it."""
    speculative = model.spec.engine.speculative
    source = None if speculative is None or speculative.draft is None else speculative.draft.parsed_source
    if not isinstance(source, FileSource) or source == model.spec.model.parsed_source:
        return None
    mounted = [PurePosixPath(each.mount_path) for each in model.spec.template.volumes]
    return None if any(PurePosixPath(source.path).is_relative_to(each) for each in mounted) else source.path


def _directory(path: str) -> dict[str, Any]:
    return {"hostPath": {"path": path, "type": "Directory"}}


def _template_volume(volume: VolumeSpec) -> dict[str, Any]:
    if volume.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim_name, "readOnly": volume.read_only}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path, "type": ""}}
    if volume.config_map_name is not None:
        return {"configMap": {"name": volume.config_map_name}}
    if volume.secret_name is not None:
        return {"secret": {"secretName": volume.secret_name}}
    return {"emptyDir": {"sizeLimit": volume.empty_dir_size_limit}}
