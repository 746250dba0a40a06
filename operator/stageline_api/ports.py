"""The ports of the pod contract.

Every pod has its own IP (in local mode its own loopback address), so ports never collide.
"""

from typing import Final

ENGINE_HTTP: Final = 8000
"""The engine, for callers with its API key."""
PLAN_BUS: Final = 5600
RENDEZVOUS: Final = 29500
STAGE_HEALTH: Final = 9100
VLLM_HTTP: Final = 8001
"""vLLM's own server in the pod of stage 0, only for the engine beside it."""
ENGINE_STATE: Final = 8002
"""The engine's state and metrics, without a key."""
GATEWAY: Final = 8080
GATEWAY_ADMIN: Final = 8081
OPERATOR_METRICS: Final = 9090
