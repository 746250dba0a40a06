"""The JSON of the stages' and the engine's health endpoints (`GET /status`)."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from stageline_api.runtime_config import LayerRange


class Phase(StrEnum):
    """The phase of a stage or an engine, in the usual order."""

    STARTING = "Starting"
    CONNECTING = "Connecting"
    LOADING = "Loading"
    RENDEZVOUS = "Rendezvous"
    WARMING = "Warming"
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"


class PrepareOutcome(StrEnum):
    """The termination message of a successful `prepare`."""

    FETCHED = "Fetched"
    """The model was not completely in the cache."""
    CACHED = "Cached"


class StageStatus(BaseModel):
    """One stage's state, served at `http://<pod>:9100/status`."""

    model_config = ConfigDict(frozen=True)

    phase: Phase
    stage: int
    stage_count: int
    incarnation: int
    layers: LayerRange | None = None
    loaded_bytes: int = 0
    total_bytes: int = 0
    memory_bytes: int = 0
    """Weights plus KV cache of this stage."""
    steps: int = 0
    message: str = ""


class EngineStatus(BaseModel):
    """The engine's view of the whole group, served at `http://<stage 0 pod>:8002/status`."""

    model_config = ConfigDict(frozen=True)

    phase: Phase
    served_name: str
    group: int | None = None
    """Index of its group. None, here and below: an engine without a group, or of an older version."""
    incarnation: int | None = None
    max_model_len: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    queue_room: int | None = None
    """How many more requests may queue; None if unknown yet, or from an older version."""
    slots: int | None = None
    """How many requests can run at once; None as above."""
    kv_usage: float = 0.0
    """Share of the KV cache that running requests hold, 0 to 1."""
    longest_wait_seconds: float = 0.0
    """Age of the oldest request that waits for its first step."""
    weights: str = ""
    """Digest of the weights of all stages; empty if unknown."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    stages_connected: int = 0
    stages_ready: int = 0
    message: str = ""
