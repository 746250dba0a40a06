"""The endpoints file: how a local gateway discovers groups (a gateway in a cluster watches pods).

The writer replaces the file by an atomic rename; the reader re-reads it when its identity changes.
"""

from typing import Final

from pydantic import BaseModel, ConfigDict

DEFAULT_RESUME_WINDOW_SECONDS: Final = 60


class GroupEndpoint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Served name."""
    group: int
    incarnation: int
    url: str
    """Base URL of the group's engine, `http://<address>:8000`, or `https` with a `tls_name`."""
    ready: bool
    revision: str = ""
    """Hash of the template that its pods were made from: groups of one revision give the same answers."""
    tls_name: str = ""
    """The DNS name that its engine's certificate must have; empty: it speaks plain HTTP."""
    draining: bool = False
    """It accepts no new requests and will end; its running requests may finish."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters on its engine; clients request each as a model of its own."""
    message: str = ""
    """If not ready, one sentence that explains why (starting, failed, backing off)."""


class Endpoints(BaseModel):
    """All groups of a gateway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: tuple[GroupEndpoint, ...] = ()
    models: tuple[str, ...] = ()
    """Served names of existing models, with or without groups."""
    adapters: dict[str, tuple[str, ...]] = {}
    """By served name: LoRA adapters that clients request as models, with or without a group."""
    suspended: tuple[str, ...] = ()
    """Served names of models that get no groups until a user resumes them (`spec.suspend`)."""
    scaled_to_zero: tuple[str, ...] = ()
    """Served names of models that get no group until a request arrives (`spec.replicas` is 0)."""
    resume_window_seconds: dict[str, float] = {}
    """By served name: how long a started request waits for a group that resumes it
    (`spec.timeouts.resumeWindowSeconds`). A model that is not listed has the default.
    """
