"""The endpoints file: how a gateway on one machine learns which groups exist (a cluster's gateway watches pods).

The writer replaces the file by atomic rename; the reader re-reads it when its identity changes.
"""

from pydantic import BaseModel, ConfigDict


class GroupEndpoint(BaseModel):
    """One group that may take requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Served name."""
    group: int
    incarnation: int
    url: str
    """Base URL of the group's engine, `http://<address>:8000`."""
    ready: bool
    message: str = ""
    """When not ready, one sentence that says why (starting, failed, backing off)."""


class Endpoints(BaseModel):
    """Everything a gateway serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    groups: tuple[GroupEndpoint, ...] = ()
