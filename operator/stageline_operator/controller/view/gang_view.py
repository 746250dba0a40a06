"""The kinds of schedulers that place whole groups, which a cluster may lack, or get and lose while the operator runs.

They are never watched: a watch that can't be had would count as the operator's own trouble. They are listed before
anything of a model is deleted, and now and then as long as some model has a gang, so that what somebody deletes or
edits is mended. Which version of Kubernetes' own the cluster has is asked by discovery, again after a while.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from stageline_api import labels
from stageline_api.resource import pipeline_model
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import (
    KAI_POD_GROUP,
    NATIVE_GANGS,
    VOLCANO_POD_GROUP,
    ModelKey,
    Resource,
)
from stageline_operator.controller.view.missing_rights import MissingRights
from stageline_operator.controller.view.object_cache import ObjectCache

NATIVE: Final = "kubernetes"
"""`placement.gang.scheduler` of who asks for Kubernetes' own."""
RELIST_SECONDS: Final = 30.0
_FOUND_SECONDS: Final = 300.0
_NOT_FOUND_SECONDS: Final = 30.0
"""How long an answer of the discovery holds: somebody may just be switching the API on."""

_log = logging.getLogger(__name__)


class GangView:
    """Feeds the cache with them. Belongs to one event loop. `namespaces`: those served; empty serves all."""

    def __init__(
        self, api: KubeApi, cache: ObjectCache, namespaces: Sequence[str], missing_rights: MissingRights
    ) -> None:
        self._api = api
        self._cache = cache
        self._namespaces = tuple(namespaces) or ("",)
        self._missing_rights = missing_rights
        self._native = ""
        self._native_until = 0.0

    async def native_api(self) -> str:
        """`apiVersion` of Kubernetes' own in this cluster; empty where it serves none. Raises `ApiError`."""
        now = asyncio.get_running_loop().time()
        if now >= self._native_until:
            self._native = await self._discover()
            self._native_until = now + (_FOUND_SECONDS if self._native else _NOT_FOUND_SECONDS)
        return self._native

    def forget_native_api(self) -> None:
        """A write says that the cluster has it no more."""
        self._native_until = 0.0

    async def look_at_model(self, key: ModelKey) -> None:
        """List those of one model, of every scheduler. Raises `ApiError`."""
        for resource in await self._resources(NATIVE in _schedulers(self._models_of(key))):
            await self._list(resource, key.namespace, key)

    async def run(self) -> None:
        """List what models with a gang may have, now and then, until cancelled."""
        while True:
            await asyncio.sleep(RELIST_SECONDS)
            try:
                await self.list_all()
            except ApiError as error:
                _log.warning("pod groups are not listed: %s", error)

    async def list_all(self) -> None:
        """List the kinds that some model asks for, in every namespace served. Raises `ApiError`."""
        asked = set(_schedulers(each for _, each in self._cache.of_kind(pipeline_model.KIND)))
        wanted = {"volcano": VOLCANO_POD_GROUP, "kai": KAI_POD_GROUP}
        resources = [resource for scheduler, resource in wanted.items() if scheduler in asked]
        if NATIVE in asked and (api := await self.native_api()):
            resources.append(NATIVE_GANGS[api])
        for resource in resources:
            for namespace in self._namespaces:
                await self._list(resource, namespace, None)

    async def _list(self, resource: Resource, namespace: str, key: ModelKey | None) -> None:
        selector = resource.selector + ("" if key is None else f",{labels.MODEL}={key.name}")
        try:
            listing = await self._api.list(resource, namespace, selector)
        except ApiError as error:
            if error.is_not_found:
                return  # a cluster has one of these schedulers, or none
            if not self._missing_rights.note(resource, error):
                raise
            return
        self._missing_rights.granted(resource)
        self._cache.replace(resource.kind, namespace, listing.items, listing.version, key)

    def _models_of(self, key: ModelKey) -> Iterator[Mapping[str, Any]]:
        if (model := self._cache.model(key)) is not None:
            yield model

    async def _resources(self, wants_native: bool) -> list[Resource]:
        api = await self.native_api() if wants_native else self._native
        return [VOLCANO_POD_GROUP, KAI_POD_GROUP, *([NATIVE_GANGS[api]] if api else [])]

    async def _discover(self) -> str:
        for api, resource in NATIVE_GANGS.items():
            if await self._api.has_kind(resource):
                return api
        return ""


def asks_for_native(specs: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a spec of a model, now or at an earlier revision, names Kubernetes' own."""
    return any(_scheduler(spec) == NATIVE for spec in specs)


def _schedulers(models: Iterable[Mapping[str, Any]]) -> list[str]:
    return [name for each in models if (name := _scheduler(each.get("spec") or {}))]


def _scheduler(spec: Mapping[str, Any]) -> str:
    """Of a spec that nobody has checked."""
    gang = (spec.get("placement") or {}).get("gang") or {}
    return str(gang.get("scheduler", "")) if isinstance(gang, Mapping) else ""
