"""Everything about a gateway that can be set; parsed once, at the command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Where groups are found and how long each wait may last."""

    endpoints_path: Path
    """The endpoints file (`stageline_api.endpoints`); it may appear later than the gateway."""
    poll_seconds: float = 0.25
    """How often the endpoints file is looked at, and so how long a group that is gone may still be tried."""
    connect_timeout_seconds: float = 2.0
    idle_timeout_seconds: float = 120.0
    """Longest silence of an engine within one request: in its queue, in prefill, or between two tokens."""
    body_timeout_seconds: float = 30.0
    """How long a client may take to send its request's body."""
    body_limit_bytes: int = 4 * 1024 * 1024
    """Room for a prompt of 128k token ids several times over."""
    retry_after_seconds: float = 2.0
    """What `Retry-After` says when no group is ready and the engine gave no better figure."""
