"""PodGroups of gang schedulers, which may be installed or removed at any time.

They are never watched: a failing watch would make the operator unready. They are listed before objects of a model are
deleted, and periodically while a model has a gang, so that deleted or edited ones are restored.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stageline_api import labels
from stageline_api.resource import pipeline_model
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import POD_GROUPS, ModelKey, Place, Resource
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.unreadable import FORBIDDEN, Unreadable

RELIST_SECONDS: Final = 30.0

_log = logging.getLogger(__name__)


class GangView:
    """Feeds the cache with PodGroups. Belongs to one event loop. `namespaces`: those served; empty serves all."""

    def __init__(self, api: KubeApi, cache: ObjectCache, namespaces: Sequence[str], unreadable: Unreadable) -> None:
        self._api = api
        self._cache = cache
        self._namespaces = tuple(namespaces) or ("",)
        self._unreadable = unreadable

    async def look_at_model(self, key: ModelKey) -> None:
        """List the PodGroups of one model, of every scheduler. Raises `ApiError`."""
        for resource in POD_GROUPS.values():
            await self._list(resource, key.namespace, key)

    async def run(self) -> None:
        """List the PodGroups of models with a gang periodically, until cancelled."""
        while True:
            await asyncio.sleep(RELIST_SECONDS)
            await self.list_all()

    async def list_all(self) -> None:
        """List the kinds that models use, in every served namespace; a failing list does not stop the others."""
        asked = {_scheduler(each.get("spec") or {}) for _, each in self._cache.of_kind(pipeline_model.KIND)}
        for resource in (each for name, each in POD_GROUPS.items() if name in asked):
            for namespace in self._namespaces:
                try:
                    await self._list(resource, namespace, None)
                except ApiError as error:
                    _log.warning("pod groups are not listed: %s", error)

    async def _list(self, resource: Resource, namespace: str, key: ModelKey | None) -> None:
        place = Place(resource, namespace)
        selector = resource.selector + ("" if key is None else f",{labels.MODEL}={key.name}")
        try:
            listing = await self._api.list(resource, namespace, selector)
        except ApiError as error:
            if error.is_not_found:
                return  # a cluster has one of these schedulers, or none
            if error.status not in FORBIDDEN:
                raise
            self._unreadable.note(place, error)
            return
        self._unreadable.clear(place)
        self._cache.replace(resource.kind, namespace, listing.items, listing.version, key)


def _scheduler(spec: Mapping[str, Any]) -> str:
    """The scheduler of an unvalidated spec."""
    gang = (spec.get("placement") or {}).get("gang") or {}
    return str(gang.get("scheduler", "")) if isinstance(gang, Mapping) else ""
