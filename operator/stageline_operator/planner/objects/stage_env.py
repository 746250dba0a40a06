"""Environment of a stage pod's containers: the pod contract, then the template's variables."""

from collections.abc import Mapping
from typing import Any

from stageline_api import engine_access, env, ports
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_api.resource.pods.pod import EnvVar
from stageline_operator.planner.objects.config import COMPILED_DIR, CONFIG_DIR, CONFIG_FILE
from stageline_operator.planner.objects.identity import (
    GroupIncarnation,
    bus_secret_name,
    headless_service_name,
    pod_name,
)
from stageline_operator.planner.objects.model_objects import TOKEN_KEY
from stageline_operator.planner.types import PodHost

TERMINATION_PATH = "/dev/termination-log"


def master_address(model: PipelineModel, life: GroupIncarnation) -> str:
    """DNS name of stage 0 of one incarnation; a pod of an older incarnation can't resolve or join it by accident."""
    return f"{pod_name(model, life, 0)}.{headless_service_name(model)}.{model.namespace}.svc"


def stage_env(
    model: PipelineModel, life: GroupIncarnation, stage: int, host: PodHost, rendezvous_seconds: int | None
) -> list[dict[str, Any]]:
    """Variables of the `stage` and `engine` containers. `rendezvous_seconds` overrides the config's limit."""
    patience = {} if rendezvous_seconds is None else {env.RENDEZVOUS_SECONDS: str(rendezvous_seconds)}
    stage_count = str(model.spec.parallelism.pipeline)
    leader = master_address(model, life)
    return [
        *base_env(model, host),
        {"name": env.POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {
            "name": env.BUS_TOKEN,
            "valueFrom": {"secretKeyRef": {"name": bus_secret_name(model), "key": TOKEN_KEY}},
        },
        _literal(env.STAGE_INDEX, str(stage)),
        _literal(env.STAGE_COUNT, stage_count),
        _literal(env.GROUP_INDEX, str(life.group)),
        _literal(env.INCARNATION, str(life.incarnation)),
        _literal(env.MASTER_ADDR, leader),
        _literal(env.MASTER_PORT, str(ports.RENDEZVOUS)),
        _literal(env.RANK, str(stage)),
        _literal(env.WORLD_SIZE, stage_count),
        _literal(env.LWS_LEADER_ADDRESS, leader),
        _literal(env.LWS_GROUP_SIZE, stage_count),
        _literal(env.LWS_WORKER_INDEX, str(stage)),
        *literals(patience),
    ]


def engine_keys_env() -> dict[str, Any]:
    """Only for the `engine` container: the API keys that callers must send."""
    reference = {"name": engine_access.KEYS_SECRET, "key": engine_access.KEYS_ENTRY}
    return {"name": env.ENGINE_KEYS, "valueFrom": {"secretKeyRef": reference}}


def network_env(model: PipelineModel) -> list[dict[str, Any]]:
    """Only for the `stage` container: the interface of NCCL and Gloo, and the network's own variables."""
    network = model.spec.network
    given = {variable.name: _given(variable) for variable in network.env}
    # NCCL reads a plain name as a prefix: eth1 would match eth10 too.
    chosen = {} if network.interface is None else {
        "NCCL_SOCKET_IFNAME": _literal("NCCL_SOCKET_IFNAME", f"={network.interface}"),
        "GLOO_SOCKET_IFNAME": _literal("GLOO_SOCKET_IFNAME", network.interface),
    }  # fmt: skip
    # A variable that the user set for all containers overrides the one derived from the interface.
    taken = {variable.name for variable in model.spec.template.env} - set(given)
    return [variable for name, variable in (chosen | given).items() if name not in taken]


def compiler_env(model: PipelineModel) -> list[dict[str, Any]]:
    """Only for the `stage` container: the compile caches of Triton, the CUDA driver and vLLM.

    Their defaults are in a home directory or include the user's name; the containers' user has neither.
    """
    taken = {variable.name for variable in model.spec.template.env}
    folders = {
        "TRITON_CACHE_DIR": f"{COMPILED_DIR}/triton",
        "CUDA_CACHE_PATH": f"{COMPILED_DIR}/cuda",
    }
    if model.spec.engine.name == "vllm":
        folders |= {"TORCHINDUCTOR_CACHE_DIR": f"{COMPILED_DIR}/inductor", "VLLM_CACHE_ROOT": f"{COMPILED_DIR}/vllm"}
    return [_literal(name, folder) for name, folder in folders.items() if name not in taken]


def prepare_env(model: PipelineModel, stage: int, host: PodHost) -> list[dict[str, Any]]:
    """The variables of `prepare`. The stage matters: only the last one fetches the draft model's weights."""
    speculative = model.spec.engine.speculative
    place = {env.STAGE_INDEX: str(stage), env.STAGE_COUNT: str(model.spec.parallelism.pipeline)}
    drafts = speculative is not None and speculative.draft is not None
    own_cache = {} if model.spec.model.cache.claim_template is None else {env.OWN_CACHE: "1"}
    return [*base_env(model, host), *hub_token_env(model), *literals(own_cache | (place if drafts else {}))]


def hub_token_env(model: PipelineModel) -> list[dict[str, Any]]:
    """The Hub token, for containers that fetch: `prepare`, and `stage` for its own shards; never the engine."""
    reference = model.spec.model.token_secret_ref
    if reference is None:
        return []
    secret = {"secretKeyRef": {"name": reference.name, "key": reference.key}}
    return [{"name": env.HF_TOKEN, "valueFrom": secret}]


def base_env(model: PipelineModel, host: PodHost) -> list[dict[str, Any]]:
    """Variables of every container. The root file system is read-only, so temporary files go to the `/tmp` volume.

    Files that libraries keep in a home directory go there too: the containers' user has no home.
    """
    given = {variable.name: _given(variable) for variable in model.spec.template.env}
    scratch = {"TMPDIR": "/tmp"} | ({"HOME": "/tmp"} if host.root_is_read_only else {})
    return [
        _literal(env.CONFIG, f"{CONFIG_DIR}/{CONFIG_FILE}"),
        _literal(env.TERMINATION_PATH, TERMINATION_PATH),
        *({name: _literal(name, value) for name, value in scratch.items()} | given).values(),
    ]


def _given(variable: EnvVar) -> dict[str, Any]:
    """A variable of the user's, in the form of a container's env."""
    if variable.value_from is None:
        return _literal(variable.name, variable.value)
    source = variable.value_from.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"name": variable.name, "valueFrom": source}


def literals(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    return [_literal(name, value) for name, value in variables.items()]


def _literal(name: str, value: str) -> dict[str, Any]:
    # `$(NAME)` in a value would be expanded; `$$` escapes `$`.
    return {"name": name, "value": value.replace("$", "$$")}
