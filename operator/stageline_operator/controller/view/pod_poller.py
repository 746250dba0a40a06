"""Polls pods for what no watch shows: why containers don't start, a stage's layers, an engine's load.

Each pod has one question at a time, which depends on its state, and the interval grows. A pending request is cancelled
when its pod is gone or has another question. Kubelets report a volume that fails to mount or a sandbox failure only in
Events, so those of pods that wait for their containers are read. Stages and engines answer `GET /status`, each on its
own port. Anyone who can create pods can label one and send any answer. So only pods that a PipelineModel owns are
polled, and answers are limited in time and size.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from stageline_api import labels, ports
from stageline_api.health import EngineStatus, Phase, StageStatus
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import EVENT, ModelKey, controller_of, model_key_of
from stageline_operator.controller.view.object_cache import Manifest, ObjectCache
from stageline_operator.planner.autoscaling import GroupLoad
from stageline_operator.planner.observed.container_end import moment
from stageline_operator.planner.observed.observed_pod import waits_for_containers
from stageline_operator.planner.types import PodTrouble

_TROUBLES: Final = frozenset(
    {
        "FailedAttachVolume",
        "FailedCreatePodSandBox",
        "FailedMapVolume",
        "FailedMount",
        "FailedPrepareDynamicResources",
        "NetworkNotReady",
    }
)
_PROGRESS: Final = frozenset({"Created", "Pulled", "Pulling", "Started", "SuccessfulAttachVolume"})
"""Reasons of Events that end a trouble: if the newest Event has one of them, the pod is getting its containers."""
_POLL_SECONDS: Final = 2.0
_TIMEOUT_SECONDS: Final = 3.0
_AT_ONCE: Final = 16
_MAX_BYTES: Final = 64 * 1024
"""Many times the size of a status."""

Status = TypeVar("Status", bound=BaseModel)

_log = logging.getLogger(__name__)


class Question(Enum):
    EVENTS = auto()
    """Why its containers don't start."""
    LAYERS = auto()
    """Polled until known: the engine decides, and stages report it after loading."""


class Pace(NamedTuple):
    """Seconds before the first poll, before the second one, and at most; each wait is `growth` times the last."""

    patience: float
    wait: float
    growth: float
    longest: float


# A pod with a user's own image may never answer, and a big model takes long to load.
_PACES: Final = {Question.EVENTS: Pace(10.0, 10.0, 2.0, 120.0), Question.LAYERS: Pace(0.0, _POLL_SECONDS, 1.3, 60.0)}


@dataclass
class _Polled:
    """One pod, by uid, so that a pod never inherits the answer of an earlier pod of its name."""

    question: Question | None
    ask_at: float
    wait_seconds: float
    layers: str = ""
    trouble: PodTrouble | None = None
    asking: "asyncio.Task[None] | None" = None
    """The pending request; the next one is due some time after its answer."""


class PodPoller:
    """Answers of pods. `on_change` is called for a new one. Belongs to one event loop, whose clock it reads."""

    def __init__(self, api: KubeApi, cache: ObjectCache, on_change: Callable[[ModelKey], None]) -> None:
        self._api = api
        self._cache = cache
        self._on_change = on_change
        self._client = httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_SECONDS)
        self._at_once = {each: asyncio.Semaphore(_AT_ONCE) for each in Question}
        self._polled: dict[str, _Polled] = {}

    def layers(self, key: ModelKey) -> Mapping[str, str]:
        """Layers of a model's stages (`0-14`), by pod name."""
        return {name: each.layers for name, each in self._of_model(key) if each.layers}

    def troubles(self, key: ModelKey) -> Mapping[str, PodTrouble]:
        """Why pods of a model don't get their containers, by pod name."""
        return {name: each.trouble for name, each in self._of_model(key) if each.trouble is not None}

    async def loads(self, key: ModelKey, incarnations: Mapping[int, int]) -> Collection[GroupLoad]:
        """Loads of the engines of these groups (index and incarnation) that currently answer.

        An engine that doesn't answer is omitted: it must not count as idle.
        """
        answers = await asyncio.gather(*(self._load_of(pod) for pod in self._engine_pods(key, incarnations)))
        return [each for each in answers if each is not None]

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for pod, polled in self._due_pods():
                    polled.asking = tasks.create_task(self._ask(pod, polled))
                await asyncio.sleep(_POLL_SECONDS)

    async def close(self) -> None:
        await self._client.aclose()

    def _of_model(self, key: ModelKey) -> Iterator[tuple[str, _Polled]]:
        for identity, manifest in self._cache.of_model(key):
            polled = self._polled.get(manifest["metadata"].get("uid", "")) if identity.kind == "Pod" else None
            if polled is not None:
                yield identity.name, polled

    def _due_pods(self) -> list[tuple[Manifest, _Polled]]:
        """Pods to poll now; drops pods that are gone, and the troubles of those that no longer wait."""
        now, due = asyncio.get_running_loop().time(), []
        before, self._polled = self._polled, {}
        for _, pod in self._cache.of_kind("Pod"):
            uid = pod["metadata"].get("uid", "")
            polled = self._polled[uid] = self._current(before.get(uid), pod, now)
            if polled.question is not None and polled.asking is None and polled.ask_at <= now:
                due.append((pod, polled))
        for uid, each in before.items():
            if each.asking is not None and self._polled.get(uid) is not each:
                each.asking.cancel()
        return due

    def _current(self, polled: _Polled | None, pod: Manifest, now: float) -> _Polled:
        """The state of a pod; a new question starts with its own intervals."""
        layers = "" if polled is None else polled.layers
        question = self._question(pod, layers)
        if polled is not None and polled.question is question:
            return polled
        pace = Pace(0.0, 0.0, 0.0, 0.0) if question is None else _PACES[question]
        return _Polled(question, now + pace.patience, pace.wait, layers)

    def _question(self, pod: Manifest, layers: str) -> Question | None:
        if waits_for_containers(pod):
            return Question.EVENTS
        status = pod.get("status", {})
        runs = status.get("phase") == "Running" and status.get("podIP")
        return Question.LAYERS if runs and not layers and self._is_owned(pod) else None

    async def _ask(self, pod: Manifest, polled: _Polled) -> None:
        assert polled.question is not None
        async with self._at_once[polled.question]:
            is_news = await (self._look_up if polled.question is Question.EVENTS else self._ask_layers)(pod, polled)
        pace = _PACES[polled.question]
        polled.asking, polled.ask_at = None, asyncio.get_running_loop().time() + polled.wait_seconds
        polled.wait_seconds = min(pace.longest, polled.wait_seconds * pace.growth)
        if is_news and (key := model_key_of(pod)) is not None:
            self._on_change(key)

    async def _look_up(self, pod: Manifest, polled: _Polled) -> bool:
        metadata = pod["metadata"]
        try:
            listing = await self._api.list(EVENT, metadata["namespace"], fields=f"regarding.uid={metadata['uid']}")
        except ApiError as error:
            _log.warning("can't read why pod %s/%s waits: %s", metadata["namespace"], metadata["name"], error)
            return False
        before, polled.trouble = polled.trouble, trouble_in(listing.items)
        return polled.trouble != before

    async def _ask_layers(self, pod: Manifest, polled: _Polled) -> bool:
        said = await self._status_of(pod, ports.STAGE_HEALTH, StageStatus)
        if said is None or said.layers is None:
            return False
        polled.layers = f"{said.layers.first}-{said.layers.last}"
        return True

    def _engine_pods(self, key: ModelKey, incarnations: Mapping[int, int]) -> Iterator[Manifest]:
        wanted = {(str(group), str(incarnation)) for group, incarnation in incarnations.items()}
        for identity, pod in self._cache.of_model(key):
            own = pod["metadata"].get("labels") or {}
            life = (own.get(labels.GROUP), own.get(labels.INCARNATION))
            is_engine = identity.kind == "Pod" and own.get(labels.STAGE) == "0" and life in wanted
            if is_engine and self._is_owned(pod) and pod.get("status", {}).get("podIP"):
                yield pod

    async def _load_of(self, pod: Manifest) -> GroupLoad | None:
        said = await self._status_of(pod, ports.ENGINE_STATE, EngineStatus)
        if said is None or said.phase is not Phase.READY or not said.slots:
            return None
        return GroupLoad(
            running=said.requests_running,
            waiting=said.requests_waiting,
            slots=said.slots,
            kv_usage=said.kv_usage,
            longest_wait_seconds=said.longest_wait_seconds,
        )

    def _is_owned(self, pod: Manifest) -> bool:
        """Whether the model that a pod's label names owns the pod."""
        key, owner = model_key_of(pod), controller_of(pod)
        model = None if key is None else self._cache.model(key)
        return model is not None and owner is not None and owner.get("uid") == model["metadata"]["uid"]

    async def _status_of(self, pod: Manifest, port: int, kind: type[Status]) -> Status | None:
        """The answer; None if it is late or malformed."""
        address = pod["status"]["podIP"]
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}/status"
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                return kind.model_validate_json(await self._read(url))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValidationError) as error:
            _log.debug("pod %s has no status: %s", pod["metadata"]["name"], error)
            return None

    async def _read(self, url: str) -> bytes:
        """The raw body up to a limit, because a compressed one could expand to any size. Raises `httpx.HTTPError`."""
        body = bytearray()
        async with self._client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer:
            async for piece in answer.aiter_raw():
                body += piece
                if len(body) > _MAX_BYTES:
                    raise httpx.DecodingError(f"{url} answers more than {_MAX_BYTES} bytes")
        return bytes(body)


def trouble_in(events: Sequence[Mapping[str, Any]]) -> PodTrouble | None:
    """The trouble in the newest of a pod's Events; None if it reports progress."""
    known = [event for event in events if event.get("reason") in _TROUBLES | _PROGRESS]
    # Kubelets count in whole seconds: of two Events in one second, progress is the later one.
    newest = max(known, key=lambda event: (_last_seen(event), event["reason"] in _PROGRESS), default=None)
    if newest is None or newest["reason"] in _PROGRESS:
        return None
    since = moment(newest.get("deprecatedFirstTimestamp")) or moment(newest.get("eventTime"))
    return PodTrouble(newest["reason"], str(newest.get("note") or newest["reason"]), since)


def _last_seen(event: Mapping[str, Any]) -> datetime:
    series = (event.get("series") or {}).get("lastObservedTime")
    found = (series, event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max((seen for text in found if (seen := moment(text)) is not None), default=datetime.min.replace(tzinfo=UTC))
