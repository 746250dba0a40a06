"""What the stage's and the engine's health endpoints say (`GET /status`), as JSON."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from stageline_api.runtime_config import LayerRange


class Phase(StrEnum):
    """Where a stage or an engine is in its life. Order is the usual order."""

    STARTING = "Starting"
    CONNECTING = "Connecting"
    LOADING = "Loading"
    RENDEZVOUS = "Rendezvous"
    WARMING = "Warming"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"


class PrepareOutcome(StrEnum):
    """What `prepare` leaves as its container's last words when all is well."""

    FETCHED = "Fetched"
    """The model was not, or not whole, in the cache."""
    CACHED = "Cached"


class StageStatus(BaseModel):
    """One stage's own account of itself, served at `http://<pod>:9100/status`."""

    model_config = ConfigDict(frozen=True)

    phase: Phase
    stage: int
    stage_count: int
    incarnation: int
    layers: LayerRange | None = None
    loaded_bytes: int = 0
    total_bytes: int = 0
    memory_bytes: int = 0
    """Weights plus KV cache this stage holds."""
    steps: int = 0
    message: str = ""


class EngineStatus(BaseModel):
    """The engine's account of the whole group, served at `http://<stage 0 pod>:8002/status`."""

    model_config = ConfigDict(frozen=True)

    phase: Phase
    served_name: str
    group: int | None = None
    """Index of its group. None, here and below: an engine outside of any, or of a version that doesn't say."""
    incarnation: int | None = None
    max_model_len: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    queue_room: int | None = None
    """How many more requests may wait; None where the engine doesn't know yet, or is of a version that doesn't say."""
    slots: int | None = None
    """How many requests can run at once; None as above."""
    kv_usage: float = 0.0
    """Share of the KV cache that running requests hold, 0 to 1."""
    longest_wait_seconds: float = 0.0
    """Since when the request waits for its first step that came first of those that do."""
    weights: str = ""
    """Digest of the weights that all stages hold; empty where it isn't known."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    stages_connected: int = 0
    stages_ready: int = 0
    message: str = ""
