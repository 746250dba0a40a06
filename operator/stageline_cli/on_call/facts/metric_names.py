"""Names of the metrics that the commands read, as they are exposed."""

from typing import Final

from stageline_gateway.telemetry import metric_names as gateway
from stageline_runtime import metric_names as runtime

MODEL_LABEL: Final = "model_name"

STAGE_BUSY: Final = runtime.STAGE_BUSY.name
STAGE_WAIT: Final = runtime.STAGE_WAIT.name
STAGE_IDLE: Final = runtime.STAGE_IDLE.name
STAGE_WALL: Final = runtime.STAGE_WALL.name
STAGE_KV_TOKENS: Final = runtime.STAGE_KV_TOKENS.name
STAGE_KV_CAPACITY: Final = runtime.STAGE_KV_CAPACITY.name

ENGINE_KV_USAGE: Final = runtime.KV_CACHE_USAGE.name
ENGINE_TOKENS: Final = runtime.GENERATION_TOKENS.name
ENGINE_PREEMPTIONS: Final = runtime.PREEMPTIONS.name

GATEWAY_REQUESTS: Final = gateway.REQUESTS.name
GATEWAY_TOKENS: Final = gateway.GENERATION_TOKENS.name
GATEWAY_BROKEN: Final = gateway.BROKEN_ANSWERS.name
GATEWAY_IN_FLIGHT: Final = gateway.IN_FLIGHT.name
GATEWAY_QUEUED: Final = gateway.QUEUED.name
FIRST_TOKEN: Final = gateway.TIME_TO_FIRST_TOKEN.name
OUTPUT_TOKEN: Final = gateway.TIME_PER_OUTPUT_TOKEN.name
