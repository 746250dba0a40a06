"""What a place where models run must tell: objects in Kubernetes form, and a way to its pods over HTTP."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import httpx

from stageline_api import labels

Manifest = Mapping[str, Any]


class Endpoint(NamedTuple):
    """Something that serves `/metrics`. `url` is its base, `http://<address>:<port>`."""

    name: str
    url: str


@dataclass(frozen=True)
class ModelObjects:
    """One PipelineModel and what belongs to it."""

    manifest: Manifest
    """With its status."""
    pods: Sequence[Manifest] = ()
    gateways: Sequence[Endpoint] = ()
    url: str = ""
    """Base URL for clients, where it is known."""
    is_up: bool = True
    """False for what a `stageline up` that has ended left behind."""
    problems: Sequence[str] = ()
    """What could not be learnt, in sentences."""
    group: int | None = None
    """The one group that is asked about; None for all. `pods` are its pods only."""

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self.manifest["metadata"].get("namespace") or "default")

    @property
    def served_name(self) -> str:
        """What clients put in `model`, and metrics in `model_name`."""
        return str(self.manifest["spec"]["model"].get("servedName") or self.name)


def is_of(pod: Manifest, group: int | None) -> bool:
    """Whether a pod belongs to a group; to any, for None."""
    return group is None or pod["metadata"].get("labels", {}).get(labels.GROUP) == str(group)


class Piece(NamedTuple):
    """One file of a debug bundle, or why there is none."""

    path: str
    text: str = ""
    missing: str = ""
    """Why it could not be collected; empty when it could."""
    document: Any = None
    """An object, to be written as YAML in place of `text`."""


class Source(Protocol):
    """One machine or one cluster."""

    @property
    def where(self) -> str:
        """In words, for a heading."""
        ...

    @property
    def http(self) -> httpx.Client:
        """Reaches every pod at `http://<pod IP>:<port>`, and every endpoint at its URL."""
        ...

    @property
    def secrets(self) -> Sequence[str]:
        """Credentials that this process logs in with, never to be written anywhere."""
        ...

    def models(self, name: str | None) -> list[ModelObjects]:
        """All models, or the one of that name (none when there is none). Raises `UserError` when it can't tell."""
        ...

    def pieces(self, model: ModelObjects) -> Iterable[Piece]:
        """Objects, events and logs for a debug bundle, beyond what `models` has. Never a Secret."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...
