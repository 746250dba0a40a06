"""The `env` of template and network under `vllm`: the variables that vLLM reads and the operator decides by itself.

A variable that would put vLLM's server out of the engine's reach, change who is in the group, undo a field of the spec
or hide the words of a failure is refused by name, with what to write instead. The supervisor hands none of them on
either, so that an image that sets one changes nothing. All others are a person's: caches, memory, kernels.
"""

from typing import Final

_GROUP: Final = "is decided by the operator: it follows from the group's pods"
_REPLICAS: Final = "would start processes that no pod of the group accounts for: use spec.replicas"
_EDGE: Final = "belongs to vLLM's HTTP server, which answers the group's own engine only: set it at the gateway"
_LAST_WORDS: Final = "is how a failure's cause is read from vLLM's log: it is the operator's"
_LIFE: Final = "is how the end of a node is noticed: it is the operator's"
_TOKEN: Final = "would show a secret in the manifest: vLLM fetches nothing, and prepare takes spec.model.tokenSecretRef"

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
    "VLLM_PLUGINS": "is how vLLM's stages are timed: it is the operator's",
    "VLLM_USE_V2_MODEL_RUNNER": "is how answers are continued: it is the operator's",
    "VLLM_API_KEY": _EDGE,
    "VLLM_USE_RUST_FRONTEND": _EDGE,
    "VLLM_SERVER_DEV_MODE": "would open routes that change the group behind the engine's back",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": _LIFE,
    "VLLM_CONFIGURE_LOGGING": _LAST_WORDS,
    "VLLM_LOGGING_CONFIG_PATH": _LAST_WORDS,
    "VLLM_LOGGING_STREAM": _LAST_WORDS,
    "VLLM_LOGGING_PREFIX": _LAST_WORDS,
    "VLLM_LOGGING_COLOR": _LAST_WORDS,
    "FORCE_COLOR": _LAST_WORDS,
    "HUGGING_FACE_HUB_TOKEN": _TOKEN,
}
"""Each variable that is not a person's to set, and why: a half-sentence that follows its name."""


OUTSIDE_VLLMS_LIST: Final = frozenset({"VLLM_DIST_IDENT", "LOCAL_WORLD_SIZE", "HUGGING_FACE_HUB_TOKEN"})
"""Those that vLLM or a library of its reads without naming them in `vllm.envs`."""
LEVEL_VARIABLE: Final = "VLLM_LOGGING_LEVEL"
PATH_VARIABLE: Final = "PYTHONPATH"
"""Stageline's own entry goes before what a person gives, so that must be a text."""
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
OWNED_CONDITION: Final = (
    f"each.name in {sorted(OWNED_VARIABLES)} || (each.name == '{LEVEL_VARIABLE}' && !(each.value in {[*_LEVELS]}))"
    f" || (each.name == '{PATH_VARIABLE}' && has(each.valueFrom))"
)
"""In CEL: whether the variable `each` has a problem."""
OWNED_RULE: Final = "has a variable that the operator decides under vllm, or that hides vLLM from it"


def variable_problem(name: str, value: str | None) -> str | None:
    """Why vLLM's nodes can't be given this variable; None when they can. A `value` from elsewhere is None."""
    if name == PATH_VARIABLE and value is None:
        return "must be a value in template.env: Stageline puts its own entry before it"
    if name == LEVEL_VARIABLE and value not in _LEVELS:
        return f"must be {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}: a failure's cause is read from vLLM's log"
    return OWNED_VARIABLES.get(name)
