"""`Source`: a cluster or this machine, as objects in Kubernetes form and HTTP access to its pods.

Also the pieces of a debug bundle from sources. A truncated log starts at a whole line, because the redaction can't
recognise half a secret.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import httpx

from stageline_api import labels

Manifest = Mapping[str, Any]


class Endpoint(NamedTuple):
    """An endpoint with `/metrics`. `url` is its base, `http://<address>:<port>`."""

    name: str
    url: str


@dataclass(frozen=True)
class ModelObjects:
    """One PipelineModel and its objects."""

    manifest: Manifest
    """Including its status."""
    pods: Sequence[Manifest] = ()
    gateways: Sequence[Endpoint] = ()
    url: str = ""
    """Base URL for clients, if known."""
    is_up: bool = True
    """False for the files of a `stageline up` that has ended."""
    problems: Sequence[str] = ()
    """Missing information, in sentences."""
    group: int | None = None
    """The one requested group; None for all. `pods` are then only its pods."""

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.manifest["metadata"].get("namespace") or "default")

    @property
    def served_name(self) -> str:
        """The name that clients send as `model`, also in metrics as `model_name`."""
        return str(self.manifest["spec"]["model"].get("servedName") or self.name)


def is_of(pod: Manifest, group: int | None) -> bool:
    """Whether a pod belongs to a group; None matches any."""
    return group is None or pod["metadata"].get("labels", {}).get(labels.GROUP) == str(group)


class Piece(NamedTuple):
    """One file of a debug bundle, or why it is missing."""

    path: str
    text: str = ""
    missing: str = ""
    """Why it could not be collected; empty if it was."""
    document: Any = None
    """An object, written as YAML instead of `text`."""


class Source(Protocol):
    """One machine or one cluster."""

    @property
    def where(self) -> str:
        """A description for a heading."""

    @property
    def http(self) -> httpx.Client:
        """Reaches every pod at `http://<pod IP>:<port>`, and every endpoint at its URL."""

    @property
    def secrets(self) -> Sequence[str]:
        """Credentials of this process's login, which must never be written."""

    def models(self, name: str | None) -> list[ModelObjects]:
        """All models, or the one of that name (empty if there is none). Raises `UserError` on failure."""

    def pieces(self, model: ModelObjects) -> Iterable[Piece]:
        """Objects, events and logs for a debug bundle, in addition to `models`. Never a Secret."""

    def close(self) -> None:
        """Close all connections."""


def last_words(pod: Manifest) -> Iterator[Piece]:
    """Termination messages of a pod's containers, of this start and of the previous one."""
    status = pod.get("status", {})
    for each in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        for field, suffix in (("state", ""), ("lastState", ".previous")):
            ended = (each.get(field) or {}).get("terminated")
            if ended is not None:
                yield Piece(f"last-words/{pod['metadata']['name']}.{each['name']}{suffix}.yaml", document=ended)


MAX_LOG_BYTES: Final = 2 * 2**20
"""Per log. The cause of a failure is at its end."""


def tail_of(path: Path, name: str) -> Piece:
    """The end of a file as a piece called `name`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_LOG_BYTES))
            return Piece(name, whole_lines(file.read(), is_cut=size > MAX_LOG_BYTES))
    except OSError as error:
        return Piece(name, missing=f"{path}: {error.strerror}")


def whole_lines(content: bytes, is_cut: bool) -> str:
    """Text without its first line, if that may be the end of a longer one."""
    text = content.decode("utf-8", errors="replace")
    if not is_cut:
        return text
    _, newline, rest = text.partition("\n")
    return f"[only the last {len(content)} bytes]\n{rest}" if newline else "[one line, too long to be shown]\n"
