"""Environment variables of the pod contract. Containers read these and the config file, nothing else."""

from typing import Final

CONFIG: Final = "STAGELINE_CONFIG"
"""Path of the resolved config (`runtime_config.RuntimeConfig` as JSON)."""
STAGE_INDEX: Final = "STAGELINE_STAGE_INDEX"
STAGE_COUNT: Final = "STAGELINE_STAGE_COUNT"
GROUP_INDEX: Final = "STAGELINE_GROUP_INDEX"
INCARNATION: Final = "STAGELINE_INCARNATION"
POD_IP: Final = "STAGELINE_POD_IP"
"""Address this pod binds its listeners to; the downward API's `status.podIP`."""
BUS_TOKEN: Final = "STAGELINE_BUS_TOKEN"
"""Shared secret of one PipelineModel's plan bus; never logged."""
ENGINE_KEYS: Final = "STAGELINE_ENGINE_KEYS"
"""Keys that an engine takes and a gateway shows (`engine_access`), a key a line; never logged."""
GATEWAY_NAMESPACES: Final = "STAGELINE_GATEWAY_NAMESPACES"
"""Namespaces that a gateway serves, where its arguments name none."""
OWN_CACHE: Final = "STAGELINE_OWN_CACHE"
"""`1` where the model cache is this pod's alone, so that preparation may remove what it doesn't ask for."""
TERMINATION_PATH: Final = "STAGELINE_TERMINATION_PATH"
"""Where a failing container writes its `TerminationMessage`."""

MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
RANK: Final = "RANK"
WORLD_SIZE: Final = "WORLD_SIZE"

LWS_LEADER_ADDRESS: Final = "LWS_LEADER_ADDRESS"
LWS_GROUP_SIZE: Final = "LWS_GROUP_SIZE"
LWS_WORKER_INDEX: Final = "LWS_WORKER_INDEX"

LOG_FORMAT: Final = "STAGELINE_LOG_FORMAT"
"""`json`, `text`, or `auto` (the default): text on a terminal, JSON elsewhere."""
LOG_LEVEL: Final = "STAGELINE_LOG_LEVEL"
"""`debug`, `info` (the default), `warning` or `error`."""

HF_TOKEN: Final = "HF_TOKEN"
