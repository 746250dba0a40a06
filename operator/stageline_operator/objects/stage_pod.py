"""The pod of one stage: `prepare` first, then `stage`, and in stage 0 the `engine` beside it."""

from typing import Any, Final

from stageline_api import labels, ports
from stageline_api.model_source import FileSource
from stageline_api.pipeline_model import PipelineModel
from stageline_api.spec_pod import ResourcesSpec
from stageline_operator.objects.config import CACHE_DIR, CONFIG_DIR
from stageline_operator.objects.identity import (
    GroupIncarnation,
    config_map_name,
    headless_service_name,
    object_metadata,
    pod_name,
)
from stageline_operator.objects.stage_env import TERMINATION_PATH, prepare_env, stage_env

STAGE_CONTAINER: Final = "stage"
ENGINE_CONTAINER: Final = "engine"
PREPARE_CONTAINER: Final = "prepare"

_USER_ID: Final = 10001
_STARTUP_SECONDS: Final = 180
"""Until the health endpoint must answer: imports on a busy machine, not loading, which the runtime times itself."""


def build_stage_pod(
    model: PipelineModel, life: GroupIncarnation, stage: int, revision: str, default_image: str
) -> dict[str, Any]:
    """Manifest of stage `stage` (0 to P - 1); `default_image` is used when the template names none."""
    name = pod_name(model, life, stage)
    stage_labels = {
        labels.GROUP: str(life.group),
        labels.STAGE: str(stage),
        labels.INCARNATION: str(life.incarnation),
        labels.REVISION: revision,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": object_metadata(model, name, "stage", **stage_labels),
        "spec": {
            "restartPolicy": "Never",
            "hostname": name,
            "subdomain": headless_service_name(model),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": model.termination_grace_period_seconds,
            "securityContext": _pod_security(),
            **_placement(model, stage),
            "initContainers": [_prepare_container(model, default_image)],
            "containers": _containers(model, life, stage, default_image),
            "volumes": _volumes(model, revision),
        },
    }


def _prepare_container(model: PipelineModel, default_image: str) -> dict[str, Any]:
    return _container(model, PREPARE_CONTAINER, default_image) | {"env": prepare_env(model)}


def _containers(model: PipelineModel, life: GroupIncarnation, stage: int, default_image: str) -> list[dict[str, Any]]:
    environment = stage_env(model, life, stage)
    stage_container = _container(model, STAGE_CONTAINER, default_image) | {
        "env": environment,
        "ports": [
            _port("health", ports.STAGE_HEALTH),
            *([_port("rendezvous", ports.RENDEZVOUS)] if stage == 0 else []),
        ],
        "resources": _resources(model, stage),
        **_probes(ports.STAGE_HEALTH),
    }
    if stage != 0:
        return [stage_container]
    engine_container = _container(model, ENGINE_CONTAINER, default_image) | {
        "env": environment,
        "ports": [_port("http", ports.ENGINE_HTTP), _port("plan-bus", ports.PLAN_BUS)],
        **_probes(ports.ENGINE_HTTP),
    }
    return [stage_container, engine_container]


def _container(model: PipelineModel, command: str, default_image: str) -> dict[str, Any]:
    return {
        "name": command,
        "image": model.spec.template.image or default_image,
        "command": ["stageline", command],
        "terminationMessagePath": TERMINATION_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": _mounts(model, writes_cache=command == PREPARE_CONTAINER),
    }


def _probes(port: int) -> dict[str, Any]:
    alive, ready = ({"httpGet": {"path": path, "port": port}} for path in ("/healthz", "/readyz"))
    return {
        "startupProbe": alive | {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": _STARTUP_SECONDS},
        "readinessProbe": ready | {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 3},
        # A stage that computes holds the interpreter for a while; only a long silence means it hangs.
        "livenessProbe": alive | {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def _resources(model: PipelineModel, stage: int) -> dict[str, Any]:
    override = model.spec.stages[stage].resources if model.spec.stages else None
    resources: ResourcesSpec = model.spec.template.resources if override is None else override
    named = {"requests": dict(resources.requests), "limits": dict(resources.limits)}
    return {kind: amounts for kind, amounts in named.items() if amounts}


def _placement(model: PipelineModel, stage: int) -> dict[str, Any]:
    template, stages = model.spec.template, model.spec.stages
    selector = dict(template.node_selector) | (dict(stages[stage].node_selector) if stages else {})
    tolerations = [*template.tolerations, *(stages[stage].tolerations if stages else ())]
    placement: dict[str, Any] = {}
    if selector:
        placement["nodeSelector"] = selector
    if tolerations:
        placement["tolerations"] = [each.model_dump(by_alias=True, exclude_none=True) for each in tolerations]
    return placement


def _volumes(model: PipelineModel, revision: str) -> list[dict[str, Any]]:
    cache_path = model.spec.model.cache.host_path
    cache: dict[str, Any] = (
        {"emptyDir": {}} if cache_path is None else {"hostPath": {"path": cache_path, "type": "DirectoryOrCreate"}}
    )
    volumes = [
        {"name": "config", "configMap": {"name": config_map_name(model, revision)}},
        {"name": "cache", **cache},
        {"name": "tmp", "emptyDir": {}},
    ]
    source = model.spec.model.parsed_source
    if isinstance(source, FileSource):
        volumes.append({"name": "source", "hostPath": {"path": source.path, "type": "Directory"}})
    return volumes


def _mounts(model: PipelineModel, writes_cache: bool) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "cache", "mountPath": CACHE_DIR, "readOnly": not writes_cache},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    source = model.spec.model.parsed_source
    if isinstance(source, FileSource):
        # At its own path, so that the source means the same inside and outside.
        mounts.append({"name": "source", "mountPath": source.path, "readOnly": True})
    return mounts


def _pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER_ID,
        "runAsGroup": _USER_ID,
        "fsGroup": _USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "containerPort": number, "protocol": "TCP"}
