"""The `env` of template and network under `vllm`: vLLM's variables, and those that the operator sets.

A variable is refused by name, with an alternative, if it would hide vLLM's server from the engine, change the members
of the group, override a field of the spec or hide the message of a failure. The supervisor removes them too, so that an
image can't set one. All others may be set: caches, memory, kernels.
"""

from typing import Final

_GROUP: Final = "is set by the operator: it follows from the group's pods"
_REPLICAS: Final = "would start processes outside the group's pods: use spec.replicas"
_EDGE: Final = "belongs to vLLM's HTTP server, which answers the group's own engine only: set it at the gateway"
_LAST_WORDS: Final = "affects vLLM's log, from which the operator reads a failure's cause"
_LIFE: Final = "is set by the operator, which detects the end of a node by it"
_TOKEN: Final = "would show a secret in the manifest: vLLM fetches nothing, and prepare uses spec.model.tokenSecretRef"

OWNED_VARIABLES: Final[dict[str, str]] = {
    "VLLM_HOST_IP": _GROUP,
    "VLLM_PORT": _GROUP,
    "VLLM_DIST_IDENT": _GROUP,
    "LOCAL_RANK": _GROUP,
    "LOCAL_WORLD_SIZE": _GROUP,
    "VLLM_PP_LAYER_PARTITION": "is spec.stages[].layers",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "is spec.timeouts.stepSeconds",
    "VLLM_ENGINE_READY_TIMEOUT_S": "is spec.timeouts.loadSeconds",
    "VLLM_MODEL_REDIRECT_PATH": "is spec.model.source",
    "VLLM_DP_RANK": _REPLICAS,
    "VLLM_DP_RANK_LOCAL": _REPLICAS,
    "VLLM_DP_SIZE": _REPLICAS,
    "VLLM_DP_MASTER_IP": _REPLICAS,
    "VLLM_DP_MASTER_PORT": _REPLICAS,
    "VLLM_PLUGINS": "is set by the operator, to time vLLM's stages",
    "VLLM_USE_V2_MODEL_RUNNER": "is set by the operator, to resume answers",
    "VLLM_API_KEY": _EDGE,
    "VLLM_USE_RUST_FRONTEND": _EDGE,
    "VLLM_SERVER_DEV_MODE": "would open routes that change the group without the engine's knowledge",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": _LIFE,
    "VLLM_CONFIGURE_LOGGING": _LAST_WORDS,
    "VLLM_LOGGING_CONFIG_PATH": _LAST_WORDS,
    "VLLM_LOGGING_STREAM": _LAST_WORDS,
    "VLLM_LOGGING_PREFIX": _LAST_WORDS,
    "VLLM_LOGGING_COLOR": _LAST_WORDS,
    "FORCE_COLOR": _LAST_WORDS,
    "HUGGING_FACE_HUB_TOKEN": _TOKEN,
}
"""Variables that users can't set, and why: a clause that follows the name."""


OUTSIDE_VLLMS_LIST: Final = frozenset({"VLLM_DIST_IDENT", "LOCAL_WORLD_SIZE", "HUGGING_FACE_HUB_TOKEN"})
"""Variables that vLLM or one of its libraries reads but that `vllm.envs` does not list."""
LEVEL_VARIABLE: Final = "VLLM_LOGGING_LEVEL"
PATH_VARIABLE: Final = "PYTHONPATH"
"""Stageline prepends its own entry, so the user's value must be a literal."""
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
OWNED_CONDITION: Final = (
    f"each.name in {sorted(OWNED_VARIABLES)} || (each.name == '{LEVEL_VARIABLE}' && !(each.value in {[*_LEVELS]}))"
    f" || (each.name == '{PATH_VARIABLE}' && has(each.valueFrom))"
)
"""In CEL: whether the variable `each` has a problem."""
OWNED_RULE: Final = "has a variable that the operator sets under vllm, or that hides vLLM from it"


def variable_problem(name: str, value: str | None) -> str | None:
    """Why vLLM's nodes can't get this variable; None if they can. `value` is None if it has a source."""
    if name == PATH_VARIABLE and value is None:
        return "must be a value in template.env: Stageline prepends its own entry"
    if name == LEVEL_VARIABLE and value not in _LEVELS:
        return f"must be {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}: a failure's cause is read from vLLM's log"
    return OWNED_VARIABLES.get(name)
