"""Posts Kubernetes Events about PipelineModels. Repeated ones are counted in their series.

An Event's name is derived from its content, so a crash after posting makes no duplicate. Events are rate-limited per
model: they explain, but are no log. Posting never delays or fails a reconcile.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from stageline_api.resource.pipeline_model import API_VERSION, KIND
from stageline_kubernetes.client import MERGE_PATCH, KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import EVENT, ModelKey
from stageline_operator.controller.lead.leader import NotLeadingError
from stageline_operator.controller.settings import FIELD_MANAGER
from stageline_operator.planner.types import PlannedEvent

_LONGEST_NOTE: Final = 1024
_LONGEST_NAME: Final = 128
"""Limit of the API server in bytes of UTF-8, although its errors call them characters."""
_ELLIPSIS: Final = "…"
_REMEMBERED: Final = 4096
_WAITING: Final = 1000
_BURST: Final = 25
_SECONDS_BETWEEN: Final = 10.0
"""Beyond the burst, one Event per model in this time."""

_log = logging.getLogger(__name__)


@dataclass
class _Allowance:
    left: float
    at: float


class EventRecorder:
    """Posts Events one after another, in its own task."""

    def __init__(self, api: KubeApi, instance: str) -> None:
        self._api = api
        self._instance = instance
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_WAITING)
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._allowances: OrderedDict[ModelKey, _Allowance] = OrderedDict()

    def record(self, model: Mapping[str, Any], event: PlannedEvent) -> None:
        """Queue one Event about `model`; it is dropped if the model has used its burst."""
        metadata = model["metadata"]
        key = ModelKey(metadata["namespace"], metadata["name"])
        about = {"namespace": key.namespace, "model": key.name}
        _log.info("%s: %s", event.reason, event.message, extra=about)
        if not self._is_allowed(key):
            return
        try:
            self._waiting.put_nowait(event_manifest(model, event, self._instance, datetime.now(UTC)))
        except asyncio.QueueFull:
            _log.warning("dropped an Event: the queue is full", extra=about)

    async def run(self) -> None:
        """Post until cancelled."""
        while True:
            await self._post(await self._waiting.get())

    async def _post(self, manifest: dict[str, Any]) -> None:
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        try:
            if name not in self._counts:
                try:
                    await self._api.create(EVENT, manifest, {})
                    self._remember(name, 1)
                    return
                except ApiError as error:
                    if not error.is_conflict:
                        raise
            count = self._counts.get(name, 1) + 1
            self._remember(name, count)
            series = {"series": {"count": count, "lastObservedTime": manifest["eventTime"]}}
            await self._api.patch(EVENT, EVENT.path(namespace, name), series, MERGE_PATCH, {})
        except ApiError as error:
            if error.is_not_found:
                self._counts.pop(name, None)  # it expired; the next one is new
            if not error.is_namespace_ending:
                _log.warning("Event %s: %s", manifest["reason"], error)
        except NotLeadingError:
            _log.info("Event %s not posted: no longer leading", manifest["reason"])

    def _remember(self, name: str, count: int) -> None:
        self._counts[name] = count
        self._counts.move_to_end(name)
        while len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)

    def _is_allowed(self, key: ModelKey) -> bool:
        now = asyncio.get_running_loop().time()
        allowance = self._allowances.pop(key, None) or _Allowance(_BURST, now)
        left = min(float(_BURST), allowance.left + (now - allowance.at) / _SECONDS_BETWEEN)
        is_allowed = left >= 1
        self._allowances[key] = _Allowance(left - 1 if is_allowed else left, now)
        while len(self._allowances) > _REMEMBERED:
            self._allowances.popitem(last=False)
        return is_allowed


def event_manifest(model: Mapping[str, Any], event: PlannedEvent, instance: str, now: datetime) -> dict[str, Any]:
    """The Event; its name is a hash of the model's uid and the Event's content, so that a repeat has the same name."""
    metadata = model["metadata"]
    said = "\n".join((metadata["uid"], event.type, event.reason, event.message))
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(said.encode(errors='replace')).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": event.type,
        "reason": cut_to_bytes(event.reason, _LONGEST_NAME),
        "action": "Reconcile",
        "note": cut_to_bytes(event.message, _LONGEST_NOTE),
        "reportingController": FIELD_MANAGER,
        "reportingInstance": cut_to_bytes(instance, _LONGEST_NAME),
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }


def cut_to_bytes(text: str, limit: int) -> str:
    """The text cut to at most `limit` bytes of UTF-8 at a character boundary, including an ellipsis."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - len(_ELLIPSIS.encode())].decode(errors="ignore") + _ELLIPSIS
