"""Models that `stageline up` serves, or has served, on this machine: from state directories and loopback addresses."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import httpx

from stageline_api.errors import UserError
from stageline_cli.on_call.sources.source import Endpoint, ModelObjects, Piece, is_of, last_words, tail_of
from stageline_local.node.container_command import pod_directory_name
from stageline_local.session.instance import InstanceRecord, read_record
from stageline_local.session.state_file import LocalState, read_state

GATEWAY_LOG: Final = Path("logs") / "gateway.log"
_ADMIN: Final = re.compile(r"admin on (http://\S+)")
_UP_LOG: Final = "up.log"


class LocalSource:
    def __init__(self, state_root: Path) -> None:
        self._root = state_root
        # A proxy of the environment is not meant for loopback, and loading certificates is slow.
        self._http = httpx.Client(trust_env=False, verify=False)

    @property
    def where(self) -> str:
        return "stageline up on this machine"

    @property
    def http(self) -> httpx.Client:
        return self._http

    @property
    def secrets(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        self._http.close()

    def models(self, name: str | None) -> list[ModelObjects]:
        """Running models; a model requested by name also after it has ended, in its last state."""
        found = [self._model(directory) for directory in self._directories()]
        if name is None:
            return [one for one in found if one is not None and one.is_up]
        return [one for one in found if one is not None and one.name == name]

    def pieces(self, model: ModelObjects) -> Iterable[Piece]:
        directory = self._root / model.name
        state = read_state(directory)
        if state is None:
            raise UserError(f"{directory} can't be read: it was removed")
        yield from _objects(state, model.group)
        others = {pod_directory_name(pod) for pod in (*state.pods, *state.ended_pods) if not is_of(pod, model.group)}
        for folder in ("logs", "logs.previous"):
            for path in sorted((directory / folder).rglob("*.log")):
                if path.parent.name not in others:
                    yield tail_of(path, f"{folder}/{path.relative_to(directory / folder)}")
        if (directory / _UP_LOG).exists():
            yield tail_of(directory / _UP_LOG, f"logs/{_UP_LOG}")

    def _directories(self) -> list[Path]:
        return sorted(each for each in self._root.iterdir() if each.is_dir()) if self._root.is_dir() else []

    def _model(self, directory: Path) -> ModelObjects | None:
        state, record = read_state(directory), read_record(directory)
        if state is None:
            return None
        running = record if record is not None and record.is_running() else None
        return ModelObjects(
            manifest=state.manifest,
            pods=state.pods if running is not None else (),
            gateways=_gateways(directory) if running is not None else (),
            url=_url(running),
            is_up=running is not None,
        )


def _url(record: InstanceRecord | None) -> str:
    return record.url if record is not None else ""


def _gateways(state_dir: Path) -> tuple[Endpoint, ...]:
    """Admin address of the last started gateway, from its log: it uses a free port."""
    try:
        said = _ADMIN.findall((state_dir / GATEWAY_LOG).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ()
    return (Endpoint("gateway", said[-1]),) if said else ()


def _objects(state: LocalState, group: int | None) -> Iterable[Piece]:
    for pod in state.ended_pods:
        if is_of(pod, group):
            yield Piece(f"ended-pods/{pod['metadata']['name']}.yaml", document=pod)
            yield from last_words(pod)
    yield from (
        Piece(f"objects/configmap-{each['metadata']['name']}.yaml", document=each) for each in state.config_maps
    )
    yield Piece("events.yaml", document={"items": list(state.events)})
