"""`Source`: where models run (a cluster or this machine), as objects in Kubernetes form and HTTP access to its pods.

Also the pieces of a debug bundle that sources give. A cut log begins with a whole line: half a line could hold half a
secret, which no pattern of the redaction finds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

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
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
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

    @property
    def http(self) -> httpx.Client:
        """Reaches every pod at `http://<pod IP>:<port>`, and every endpoint at its URL."""

    @property
    def secrets(self) -> Sequence[str]:
        """Credentials that this process logs in with, never to be written anywhere."""

    def models(self, name: str | None) -> list[ModelObjects]:
        """All models, or the one of that name (none when there is none). Raises `UserError` when it can't tell."""

    def pieces(self, model: ModelObjects) -> Iterable[Piece]:
        """Objects, events and logs for a debug bundle, beyond what `models` has. Never a Secret."""

    def close(self) -> None:
        """Close all connections."""


def last_words(pod: Manifest) -> Iterator[Piece]:
    """Termination messages of a pod's containers, of this start and of the one before."""
    status = pod.get("status", {})
    for each in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        for field, suffix in (("state", ""), ("lastState", ".previous")):
            ended = (each.get(field) or {}).get("terminated")
            if ended is not None:
                yield Piece(f"last-words/{pod['metadata']['name']}.{each['name']}{suffix}.yaml", document=ended)


MAX_LOG_BYTES: Final = 2 * 2**20
"""Of each log. What matters of a failure stands at its end."""


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
    """Text without the first line when that may be the end of a longer one."""
    text = content.decode("utf-8", errors="replace")
    if not is_cut:
        return text
    _, newline, rest = text.partition("\n")
    return f"[only the last {len(content)} bytes]\n{rest}" if newline else "[one line, too long to be shown]\n"
