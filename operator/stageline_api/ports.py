"""The ports of the pod contract, one constant each.

Every pod has its own IP (a loopback address of its own on one machine), so these never collide.
"""

from typing import Final

ENGINE_HTTP: Final = 8000
"""The engine, for callers that show its key."""
PLAN_BUS: Final = 5600
RENDEZVOUS: Final = 29500
STAGE_HEALTH: Final = 9100
VLLM_HTTP: Final = 8001
"""vLLM's own server in the pod of stage 0, for the engine beside it and nobody else."""
ENGINE_STATE: Final = 8002
"""What the engine says of itself, metrics among it: nothing else, and no key is asked."""
GATEWAY: Final = 8080
GATEWAY_ADMIN: Final = 8081
OPERATOR_METRICS: Final = 9090
