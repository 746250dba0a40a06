"""The command line and environment of one vLLM node, from the pod contract and the engine's welcome. Pure.

Every node gets the same arguments except its rank, since each node's vLLM builds one configuration from them. User
arguments (`extraArgs`) are last and were validated before. Variables that the pod's environment already sets are
kept, so that `template.env` can override a default of ours, but never a setting that defines the group.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stageline_api import ports
from stageline_api.resource.pods.vllm_environment import variable_problem
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.messages import Welcome
from stageline_vllm.addresses import http_host, network_interface, rendezvous_port
from stageline_vllm.plugin_path import EVEN_COHORTS_SCHEDULER, plugin_names
from stageline_vllm.serve_words import KEY_MIDDLEWARE, NEEDED_ENVIRONMENT, NEEDED_WORDS
from stageline_vllm.server_key import KEY_VARIABLE, server_key
from stageline_vllm.worker_state import DIRECTORY_VARIABLE

VLLM_MODULE: Final = "vllm.entrypoints.cli.main"
SCHEDULER_VARIABLE: Final = "STAGELINE_VLLM_EVEN_COHORTS"
"""Set to 0, vLLM keeps its own scheduler: for comparisons."""

OWN_TIMEOUT_GRACE_SECONDS: Final = 15
"""vLLM's own step timeout doesn't name the stage that hung, so it fires after all the timeouts that do."""


def node_words(contract: PodContract, welcome: Welcome, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What follows the interpreter: module, `serve`, the model's directory and all arguments."""
    return (
        *("-m", VLLM_MODULE, "serve", welcome.model_dir),
        *_group_words(contract),
        *_model_words(contract, welcome),
        *_adapter_words(contract),
        *NEEDED_WORDS,
        *(("--scheduler-cls", EVEN_COHORTS_SCHEDULER) if _wants_even_cohorts(contract, environ) else ()),
        *_server_words(contract),
        *contract.config.extra_args,
    )


def _wants_even_cohorts(contract: PodContract, environ: Mapping[str, str]) -> bool:
    return contract.stage_count > 1 and environ.get(SCHEDULER_VARIABLE, "1") != "0"


def _group_words(contract: PodContract) -> tuple[str, ...]:
    timeouts = contract.config.timeouts
    # Loading takes longer than a step; a worker that is gone is seen by its supervisor long before either.
    limit = str(max(1, round(timeouts.step_seconds), round(timeouts.load_seconds)))
    return (
        *("--pipeline-parallel-size", str(contract.stage_count)),
        *("--tensor-parallel-size", str(contract.config.tensor)),
        *("--nnodes", str(contract.stage_count)),
        *("--node-rank", str(contract.stage)),
        *("--master-addr", contract.master_addr),
        *("--master-port", str(rendezvous_port(contract.master_addr, contract.master_port))),
        *("--distributed-executor-backend", "mp"),
        *("--distributed-timeout-seconds", limit),
        *("--cpu-distributed-timeout-seconds", limit),
    )


def _model_words(contract: PodContract, welcome: Welcome) -> tuple[str, ...]:
    config = contract.config
    return (
        *("--served-model-name", config.served_name),
        *("--dtype", welcome.dtype),
        *("--max-model-len", str(welcome.slot_tokens)),
        *("--max-num-seqs", str(welcome.num_slots)),
        *("--max-num-batched-tokens", str(welcome.max_step_tokens)),
        "--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching",
        *("--seed", str(config.seed)),
    )


def _adapter_words(contract: PodContract) -> tuple[str, ...]:
    adapters = contract.config.lora_adapters
    if not adapters:
        return ()
    modules = (f"{adapter.name}={adapter.path}" for adapter in adapters)
    return ("--enable-lora", "--max-loras", str(len(adapters)), "--lora-modules", *modules)


def _server_words(contract: PodContract) -> tuple[str, ...]:
    if contract.stage != 0:
        return ("--headless",)
    return (
        *("--host", http_host(contract.pod_ip)),
        *("--port", str(ports.VLLM_HTTP)),
        *("--middleware", KEY_MIDDLEWARE),
        "--disable-uvicorn-access-log",
    )


def node_environment(
    contract: PodContract, welcome: Welcome, environ: Mapping[str, str], *, state_dir: Path, scratch: Path,
    python_path: tuple[Path, ...], cores: tuple[int, ...], num_memories: int,
) -> dict[str, str]:  # fmt: skip
    """The child's whole environment; `cores` are those of the machine that this process may use, which has
    `num_memories` NUMA nodes."""
    timeouts = contract.config.timeouts
    step_seconds = round(timeouts.step_seconds) + OWN_TIMEOUT_GRACE_SECONDS
    load_seconds = round(timeouts.load_seconds) + OWN_TIMEOUT_GRACE_SECONDS
    decided = {
        **NEEDED_ENVIRONMENT,
        "VLLM_HOST_IP": contract.pod_ip,
        "VLLM_PP_LAYER_PARTITION": ",".join(map(str, welcome.layer_counts)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(step_seconds),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(load_seconds),
        "VLLM_PLUGINS": plugin_names(),
        "PYTHONPATH": _joined(python_path, environ.get("PYTHONPATH", "")),
        DIRECTORY_VARIABLE: str(state_dir),
        **_own_key(contract),
    }
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_CACHE_ROOT": str(scratch / "vllm-cache"),
        "HOME": str(scratch),
        "USER": "stageline",  # torch needs a user name, and a container's user may have none
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor-cache"),
        "TRITON_CACHE_DIR": str(scratch / "triton-cache"),
        **_interface(contract),
        **_own_cores(contract, welcome, cores, num_memories),
    }
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _NOT_PASSED_ON and variable_problem(name, value) is None
    }
    return defaults | kept | decided


_NOT_PASSED_ON: Final = {
    "STAGELINE_BUS_TOKEN", "HF_TOKEN", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
}  # fmt: skip
"""Secrets that vLLM doesn't need, and variables that torch would take for a group of its own.

Also variables that users may not set, in case the image sets them.
"""


def _own_key(contract: PodContract) -> dict[str, str]:
    """The server's key; other nodes have none and don't need it."""
    if contract.stage != 0:
        return {}
    return {KEY_VARIABLE: server_key(contract.bus_token, contract.group, contract.incarnation)}


def _interface(contract: PodContract) -> dict[str, str]:
    name = network_interface(contract.pod_ip, contract.config.network_interface)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def _own_cores(contract: PodContract, welcome: Welcome, cores: tuple[int, ...], num_memories: int) -> dict[str, str]:
    """This stage's part of a machine that several stages share, and each worker's part of that (CPU only).

    By itself vLLM would give all of it to each stage, and refuses more workers than the machine has NUMA nodes. Where
    there are too few cores for all of them, a stage takes any, and workers share one.
    """
    sharing, workers = welcome.stages_on_host, contract.config.tensor
    is_crowded = len(cores) < sharing
    if (workers == 1 and (sharing < 2 or is_crowded)) or sharing < 2 <= workers <= num_memories:
        return {}
    own = cores if is_crowded else cores[contract.stage % sharing :: sharing]
    parts = [own[rank::workers] or (own[rank % len(own)],) for rank in range(workers)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}


def _joined(paths: tuple[Path, ...], earlier: str) -> str:
    return ":".join([*map(str, paths), *([earlier] if earlier else [])])
