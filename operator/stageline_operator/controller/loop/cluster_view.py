"""Keeps the cache in step with the cluster, by watch events and by full lists.

kopf does not tell what was deleted while a stream was broken, and such an object would stay in the cache for ever. So
every resource is listed when watching starts, soon after kopf itself had to list again, and every few minutes.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from stageline_api import labels
from stageline_kubernetes.client import KubeApi
from stageline_kubernetes.errors import ApiError
from stageline_operator.controller.client.resources import (
    NODE,
    PIPELINE_MODEL,
    POD,
    ModelKey,
    Resource,
)
from stageline_operator.controller.settings import OperatorSettings
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.view.gang_view import GangView
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.observe import node_losses

_SETTLE_SECONDS: Final = 1.0
_FIRST_RETRY_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 15.0

_log = logging.getLogger(__name__)


class ClusterView:
    """Feeds the cache, and knows whether every resource has been listed."""

    def __init__(
        self,
        api: KubeApi,
        cache: ObjectCache,
        resources: Sequence[Resource],
        settings: OperatorSettings,
        metrics: OperatorMetrics,
        gangs: GangView,
    ) -> None:
        self._api = api
        self._cache = cache
        self.resources = tuple(resources)
        self._namespaces = settings.namespaces or ("",)
        self._relist_seconds = settings.relist_seconds
        self._metrics = metrics
        self._gangs = gangs
        self._heard_at: dict[str, float] = {}
        self._wanted: dict[Resource, float] = {}
        """Resources to list again, and when."""
        self._woken = asyncio.Event()
        self._listed: set[Resource] = set()
        self.synced = asyncio.Event()
        """Set once every resource has been listed."""

    @property
    def watches_nodes(self) -> bool:
        return NODE in self.resources

    def ages_seconds(self) -> dict[str, float]:
        """Seconds since the last event or list of each resource, by plural."""
        now = asyncio.get_running_loop().time()
        return {plural: now - heard_at for plural, heard_at in self._heard_at.items()}

    def watching_started(self) -> None:
        """kopf starts anew: events since its end are lost, so everything must be listed."""
        for resource in self.resources:
            self._want(resource, _SETTLE_SECONDS)

    def take_event(self, resource: Resource, kind: str | None, manifest: dict[str, Any]) -> None:
        """One event of a watch; `kind` None is an object of a list that kopf made."""
        self._heard_at[resource.plural] = asyncio.get_running_loop().time()
        if kind == "DELETED":
            self._cache.remove(resource.kind, manifest)
            return
        self._cache.put(resource.kind, manifest)
        if kind is None and resource in self._listed:
            self._want(resource, _SETTLE_SECONDS)

    async def run(self) -> None:
        """List what must be listed, until cancelled."""
        for resource in self.resources:
            self._want(resource, 0.0)
        while True:
            now = asyncio.get_running_loop().time()
            for resource in [resource for resource, at in self._wanted.items() if at <= now]:
                await self._list_patiently(resource)
            await self._sleep_until_wanted()

    async def list_everything(self) -> None:
        """List every resource now, waiting for as long as the API server is out."""
        for resource in self.resources:
            await self._list_patiently(resource)

    async def look_at_model(self, key: ModelKey) -> None:
        """Read one model, its pods, the PodGroups it asks for, and those of its nodes that seem lost, as they are now.

        Raises `ApiError`.
        """
        await self.look_at_status(key)
        listing = await self._api.list(POD, key.namespace, f"{POD.selector},{labels.MODEL}={key.name}")
        self._cache.replace(POD.kind, key.namespace, listing.items, listing.version, key)
        model = self._cache.model(key)
        if model is not None and model["spec"].get("placement", {}).get("gang"):
            await self._gangs.look_at_model(key)
        if not self.watches_nodes:
            return
        pods = [manifest for identity, manifest in self._cache.of_model(key) if identity.kind == POD.kind]
        losses = node_losses(self._cache, pods, datetime.now(UTC))
        for name in sorted(losses.lost | losses.unheard):
            await self._look_at_node(name)

    async def _look_at_node(self, name: str) -> None:
        try:
            self._cache.put(NODE.kind, await self._api.get(NODE, "", name))
        except ApiError as error:
            if not error.is_not_found:
                raise

    async def look_at_status(self, key: ModelKey) -> None:
        """Read one PipelineModel as it is now. Raises `ApiError`."""
        try:
            self._cache.put(PIPELINE_MODEL.kind, await self._api.get(PIPELINE_MODEL, key.namespace, key.name))
        except ApiError as error:
            if not error.is_not_found:
                raise
            # The watch may have told of its end already.
            if (known := self._cache.model(key)) is not None:
                self._cache.remove(PIPELINE_MODEL.kind, known)

    async def _list_patiently(self, resource: Resource) -> None:
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            try:
                return await self._list(resource)
            except ApiError as error:
                wait_seconds = max(retry_seconds, error.retry_after_seconds or 0.0)
                _log.warning("trying again in %g s: %s", wait_seconds, error)
            await asyncio.sleep(wait_seconds)
            retry_seconds = min(_LONGEST_RETRY_SECONDS, retry_seconds * 2)

    async def _list(self, resource: Resource) -> None:
        namespaces = self._namespaces if resource.namespaced else ("",)
        wrong = 0
        for namespace in namespaces:
            listing = await self._api.list(resource, namespace, resource.selector)
            wrong += self._cache.replace(resource.kind, namespace, listing.items, listing.version)
        if resource in self._listed and wrong:
            _log.info("a full list of %s corrected %d objects", resource.plural, wrong)
            self._metrics.corrections.labels(resource.plural).inc(wrong)
        loop = asyncio.get_running_loop()
        self._heard_at[resource.plural] = loop.time()
        self._wanted[resource] = loop.time() + self._relist_seconds
        self._listed.add(resource)
        if len(self._listed) == len(self.resources):
            self.synced.set()

    def _want(self, resource: Resource, seconds: float) -> None:
        at = asyncio.get_running_loop().time() + seconds
        self._wanted[resource] = min(at, self._wanted.get(resource, at))
        self._woken.set()

    async def _sleep_until_wanted(self) -> None:
        self._woken.clear()
        seconds = min(self._wanted.values()) - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._woken.wait()
        except TimeoutError:
            pass
