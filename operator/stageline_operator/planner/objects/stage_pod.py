"""The pod of one stage: `prepare` first, then `stage`; stage 0 has the `engine` beside it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from stageline_api import labels, ports
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.serving.model_source import HubSource
from stageline_operator.planner.objects.identity import (
    GroupIncarnation,
    cache_claim_name,
    certificate_name,
    headless_service_name,
    object_metadata,
    pod_name,
)
from stageline_operator.planner.objects.pod_overlay import with_overlay
from stageline_operator.planner.objects.pod_placement import given_metadata, given_overlay, pod_placement
from stageline_operator.planner.objects.pod_resources import (
    engine_resources,
    prepare_resources,
    requests_gpus,
    stage_resources,
)
from stageline_operator.planner.objects.pod_volumes import container_mounts, pod_volumes
from stageline_operator.planner.objects.stage_env import (
    TERMINATION_PATH,
    base_env,
    compiler_env,
    engine_keys_env,
    hub_token_env,
    literals,
    network_env,
    prepare_env,
    stage_env,
)
from stageline_operator.planner.objects.vllm_stage import (
    FILES_CONTAINER,
    files_container,
    image_without_stageline,
    is_vllm,
    vllm_container,
)
from stageline_operator.planner.types import PodHost, VllmImages

STAGE_CONTAINER: Final = "stage"
ENGINE_CONTAINER: Final = "engine"
PREPARE_CONTAINER: Final = "prepare"

_CLUSTER_NODE: Final = PodHost()
_NO_IMAGES: Final = VllmImages()

_STARTUP_SECONDS: Final = 180
"""Time for the health endpoint to answer: it covers imports on a busy machine. The runtime limits loading itself."""


def build_stage_pod(
    model: PipelineModel,
    life: GroupIncarnation,
    stage: int,
    revision: str,
    default_image: str,
    tracing_env: Mapping[str, str] = MappingProxyType({}),
    host: PodHost = _CLUSTER_NODE,
    vllm_images: VllmImages = _NO_IMAGES,
    rendezvous_seconds: int | None = None,
) -> dict[str, Any]:
    """Manifest of stage `stage` (0 to P - 1); `default_image` and `vllm_images` are used if the model names none.

    The engine gets `tracing_env`, except variables that the template sets. `rendezvous_seconds` overrides the model's
    limit for this pod.
    """
    name = pod_name(model, life, stage)
    bare_image = image_without_stageline(model, vllm_images)
    files_image = None if bare_image is None else vllm_images.files or default_image
    gpu_class = host.gpu_runtime_class if requests_gpus(model, stage, host.gpu_resource) else ""
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(model, life, stage, revision),
        "spec": {
            "restartPolicy": "Never",
            "hostname": name,
            "subdomain": headless_service_name(model),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": model.termination_grace_period_seconds,
            "securityContext": _pod_security(model),
            **_pull_secrets(model),
            **pod_placement(model, life, stage, gpu_class),
            "initContainers": _init_containers(model, stage, default_image, host, files_image),
            "containers": _containers(
                model,
                stage_env(model, life, stage, host, rendezvous_seconds),
                stage,
                default_image,
                tracing_env,
                host,
                bare_image,
            ),
            "volumes": pod_volumes(model, revision, bare_image is not None, cache_claim_name(model, life.group, stage)),
        },
    }
    return with_overlay(pod, given_overlay(model, life, stage))


def _metadata(model: PipelineModel, life: GroupIncarnation, stage: int, revision: str) -> dict[str, Any]:
    given_labels, annotations = given_metadata(model, life, stage)
    stage_labels = {
        labels.GROUP: str(life.group),
        labels.STAGE: str(stage),
        labels.INCARNATION: str(life.incarnation),
        labels.REVISION: revision,
    }
    metadata = object_metadata(model, pod_name(model, life, stage), "stage", **given_labels, **stage_labels)
    if model.spec.network.tls is not None:
        annotations = {**annotations, labels.TLS_NAME: certificate_name(model)}
    return metadata | ({"annotations": annotations} if annotations else {})


def _init_containers(
    model: PipelineModel, stage: int, default_image: str, host: PodHost, files_image: str | None
) -> list[dict[str, Any]]:
    prepare = _prepare_container(model, stage, default_image, host)
    if files_image is None:
        return [prepare]
    files = _container(model, FILES_CONTAINER, files_image) | {"env": base_env(model, host)}
    # It runs before the stage too, and a quota rejects a pod if one container names no amounts.
    resources = {"resources": prepare["resources"]} if "resources" in prepare else {}
    return [prepare, files_container(files) | resources]


def _prepare_container(model: PipelineModel, stage: int, default_image: str, host: PodHost) -> dict[str, Any]:
    resources = prepare_resources(model, stage)
    return _container(model, PREPARE_CONTAINER, default_image) | {
        "env": prepare_env(model, stage, host),
        **({"resources": resources} if resources else {}),
    }


def _containers(
    model: PipelineModel,
    environment: list[dict[str, Any]],
    stage: int,
    default_image: str,
    tracing_env: Mapping[str, str],
    host: PodHost,
    bare_image: str | None,
) -> list[dict[str, Any]]:
    own = [*compiler_env(model), *hub_token_env(model), *network_env(model)]
    stage_container: dict[str, Any] = _container(model, STAGE_CONTAINER, default_image) | {
        "env": _with_later(environment, own),
        "ports": [
            _port("health", ports.STAGE_HEALTH),
            *([_port("rendezvous", ports.RENDEZVOUS)] if stage == 0 else []),
        ],
        "resources": stage_resources(model, stage, host.gpu_resource),
        **_probes(ports.STAGE_HEALTH),
    }
    if model.spec.network.rdma_resource is not None:
        # RDMA pins its buffers in memory, which exceeds a container's memory lock limit.
        stage_container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    if is_vllm(model):
        stage_container = vllm_container(stage_container, bare_image)
    if stage != 0:
        return [stage_container]
    resources = engine_resources(model, stage)
    engine_container = _container(model, ENGINE_CONTAINER, default_image) | {
        "env": _with_later(literals(tracing_env), [*environment, engine_keys_env()]),
        "ports": [
            _port("http", ports.ENGINE_HTTP),
            _port("state", ports.ENGINE_STATE),
            _port("plan-bus", ports.PLAN_BUS),
        ],
        **({"resources": resources} if resources else {}),
        # The state port also answers probes, and never uses TLS.
        **_probes(ports.ENGINE_HTTP if model.spec.network.tls is None else ports.ENGINE_STATE),
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
            "runAsNonRoot": model.spec.template.security_context.run_as_non_root,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": container_mounts(
            model,
            writes_cache=_writes_cache(model, command),
            compiles=command == STAGE_CONTAINER,
            connects=command in (STAGE_CONTAINER, ENGINE_CONTAINER),
        ),
    }


def _writes_cache(model: PipelineModel, command: str) -> bool:
    """Stageline's own stages fetch their shards of a Hub model; else all files exist before they start."""
    fetches_shards = isinstance(model.spec.model.parsed_source, HubSource) and not is_vllm(model)
    return command == PREPARE_CONTAINER or (command == STAGE_CONTAINER and fetches_shards)


def _probes(port: int) -> dict[str, Any]:
    alive, ready = ({"httpGet": {"path": path, "port": port}} for path in ("/healthz", "/readyz"))
    return {
        "startupProbe": alive | {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": _STARTUP_SECONDS},
        "readinessProbe": ready | {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 3},
        # A computing stage can hold the interpreter for a while; only a long silence means that it hangs.
        "livenessProbe": alive | {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def _with_later(entries: list[dict[str, Any]], later: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both lists of variables; the later one wins for a common name."""
    return list({each["name"]: each for each in (*entries, *later)}.values())


def _pod_security(model: PipelineModel) -> dict[str, Any]:
    given = model.spec.template.security_context.model_dump(mode="json", by_alias=True)
    return {name: value for name, value in given.items() if value != []} | {
        "seccompProfile": {"type": "RuntimeDefault"}
    }


def _pull_secrets(model: PipelineModel) -> dict[str, Any]:
    named = [{"name": each.name} for each in model.spec.template.image_pull_secrets]
    return {"imagePullSecrets": named} if named else {}


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "containerPort": number, "protocol": "TCP"}
