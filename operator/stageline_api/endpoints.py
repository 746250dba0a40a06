"""The endpoints file: how a gateway on one machine learns which groups exist (a cluster's gateway watches pods).

The writer replaces the file by atomic rename; the reader re-reads it when its identity changes.
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
    """Hash of the template its pods were made from: groups of one revision answer alike."""
    tls_name: str = ""
    """The DNS name that its engine's certificate must be for; empty: it speaks plain HTTP."""
    draining: bool = False
    """It takes no new request and will end; answers that run on it may go on until then."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters that its engine answers with, each asked for as a model of its own."""
    message: str = ""
    """When not ready, one sentence that says why (starting, failed, backing off)."""


class Endpoints(BaseModel):
    """Everything a gateway serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: tuple[GroupEndpoint, ...] = ()
    models: tuple[str, ...] = ()
    """Served names of models that are there, whether or not any group of theirs is."""
    adapters: dict[str, tuple[str, ...]] = {}
    """By served name: LoRA adapters that are asked for as models of their own, whether or not a group is there."""
    suspended: tuple[str, ...] = ()
    """Served names of models that get no groups until a person resumes them (`spec.suspend`)."""
    scaled_to_zero: tuple[str, ...] = ()
    """Served names of models that have no group until somebody asks for one (`spec.replicas` is 0)."""
    resume_window_seconds: dict[str, float] = {}
    """By served name: how long an answer that has begun waits for a group that continues it
    (`spec.timeouts.resumeWindowSeconds`). A model that is left out has the default."""
