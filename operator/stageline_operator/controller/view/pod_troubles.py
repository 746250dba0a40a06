"""Why a pod that has a node does not get its containers, which kubelets report in Events alone.

A volume that won't mount or a sandbox that can't be made leaves the pod's status at ContainerCreating. So pods that
stay there for a while are asked after, less often each time; the Events of all others are never read.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import EVENT, ModelKey, model_key_of
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_answers import PodAnswers
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
"""Reasons of Events that end a trouble: a pod whose newest Event has one of them is getting its containers."""
_POLL_SECONDS: Final = 2.0
_AT_ONCE: Final = 8
_PATIENCE_SECONDS: Final = 10.0
_LONGEST_WAIT_SECONDS: Final = 120.0

_log = logging.getLogger(__name__)


class PodTroubles:
    """The last trouble of each pod, by uid. `on_change` is called when it changes."""

    def __init__(self, api: KubeApi, cache: ObjectCache, on_change: Callable[[ModelKey], None]) -> None:
        self._api = api
        self._cache = cache
        self._on_change = on_change
        self._troubles = PodAnswers[PodTrouble](
            cache,
            wait_seconds=_PATIENCE_SECONDS,
            growth=2.0,
            longest_wait_seconds=_LONGEST_WAIT_SECONDS,
            patience_seconds=_PATIENCE_SECONDS,
        )

    def known(self, key: ModelKey) -> Mapping[str, PodTrouble]:
        """Troubles by pod name, of one model."""
        return self._troubles.of_model(key)

    async def run(self) -> None:
        while True:
            due = [pod for _, pod in zip(range(_AT_ONCE), self._due_pods(), strict=False)]
            await asyncio.gather(*(self._look(pod) for pod in due))
            await asyncio.sleep(_POLL_SECONDS)

    def _due_pods(self) -> Iterator[Mapping[str, Any]]:
        """Pods that have waited long enough since they got their node; forgets those that wait no more."""
        pods = {pod["metadata"].get("uid", ""): pod for _, pod in self._cache.of_kind("Pod")}
        waiting = {uid: pod for uid, pod in pods.items() if waits_for_containers(pod)}
        self._troubles.keep(waiting)
        yield from (pod for uid, pod in waiting.items() if self._troubles.is_due(uid))

    async def _look(self, pod: Mapping[str, Any]) -> None:
        metadata, key = pod["metadata"], model_key_of(pod)
        uid = metadata["uid"]
        self._troubles.wait_longer(uid)
        try:
            listing = await self._api.list(EVENT, metadata["namespace"], fields=f"regarding.uid={uid}")
        except ApiError as error:
            _log.warning("why pod %s/%s waits is not known: %s", metadata["namespace"], metadata["name"], error)
            return
        trouble, before = trouble_in(listing.items), self._troubles.by_uid.pop(uid, None)
        if trouble is not None:
            self._troubles.by_uid[uid] = trouble
        if trouble != before and key is not None:
            self._on_change(key)


def trouble_in(events: Sequence[Mapping[str, Any]]) -> PodTrouble | None:
    """The trouble that the newest of a pod's Events reports; None when it reports progress."""
    told = [event for event in events if event.get("reason") in _TROUBLES | _PROGRESS]
    # Kubelets count in whole seconds: of two in one second, progress is the later one.
    newest = max(told, key=lambda event: (_last_seen(event), event["reason"] in _PROGRESS), default=None)
    if newest is None or newest["reason"] in _PROGRESS:
        return None
    since = moment(newest.get("deprecatedFirstTimestamp")) or moment(newest.get("eventTime"))
    return PodTrouble(newest["reason"], str(newest.get("note") or newest["reason"]), since)


def _last_seen(event: Mapping[str, Any]) -> datetime:
    series = (event.get("series") or {}).get("lastObservedTime")
    found = (series, event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max((seen for text in found if (seen := moment(text)) is not None), default=datetime.min.replace(tzinfo=UTC))
