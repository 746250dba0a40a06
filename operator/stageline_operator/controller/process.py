"""The operator as one process: every part made, started in order, and ended in order.

All replicas watch; only the one that holds the lease acts. It looks at the whole cluster anew before its first pass.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from kubernetes.aio.client import Configuration

from stageline_kubernetes.client import KubeApi
from stageline_operator.controller.client.resources import ModelKey
from stageline_operator.controller.lead.claims import Claims
from stageline_operator.controller.lead.leader import Leadership
from stageline_operator.controller.loop.autoscaler import Autoscaler
from stageline_operator.controller.loop.cluster_view import ClusterView
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.loop.reconciler import Reconciler
from stageline_operator.controller.loop.work_queue import WorkQueue
from stageline_operator.controller.loop.workers import Workers
from stageline_operator.controller.preflight import RightsGrantedError, until_granted, watchable_resources
from stageline_operator.controller.settings import FIELD_MANAGER, OperatorSettings
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.http_endpoints import HttpEndpoints
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.model_gauges import Reading
from stageline_operator.controller.view.gang_view import GangView
from stageline_operator.controller.view.missing_rights import MissingRights
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_troubles import PodTroubles
from stageline_operator.controller.view.stage_layers import StageLayers
from stageline_operator.controller.view.watch_source import WatchSource
from stageline_operator.planner.types import PodHost, Setting, VllmImages, component_peers

STUCK_SECONDS: Final = 120.0
_LAST_PASSES_SECONDS: Final = 8.0

_log = logging.getLogger(__name__)


class OperatorProcess:
    """One replica. `before_write` is a seam for tests: it hears of every write and may raise in its place."""

    def __init__(
        self,
        settings: OperatorSettings,
        configuration: Configuration,
        before_write: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._configuration = configuration
        self._before_write = before_write
        self._is_acting = False
        self.metrics = OperatorMetrics()
        times = settings.lease_times
        self._api = KubeApi(
            configuration,
            times.longest_write_seconds,
            before_write=self._check,
            on_call=self.metrics.count_call,
            user_agent=FIELD_MANAGER,
        )
        self._lease_api = KubeApi(
            configuration,
            times.longest_write_seconds,
            times.longest_write_seconds,
            on_call=self.metrics.count_call,
            tries=1,  # a renewal that was sent again would conflict with itself
            user_agent=FIELD_MANAGER,
        )
        self.leadership = (
            None
            if settings.lease is None
            else Leadership(self._lease_api, settings.lease, times, settings.identity, settings.namespaces)
        )
        self.queue = WorkQueue()
        self.cache = ObjectCache(self._changed)
        self._missing_rights = MissingRights()
        self._gangs = GangView(self._api, self.cache, settings.namespaces, self._missing_rights)
        self._view: ClusterView | None = None
        self._source: WatchSource | None = None
        self._workers: Workers | None = None
        self.endpoints = HttpEndpoints(self.metrics.registry, self._unhealthy, self._unready)
        self.metrics.expose(self.cache, self._readings)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`. Raises `UserError` when the metrics port can't be had."""
        await self.endpoints.start(self._settings.metrics_host, self._settings.metrics_port)
        _log.info("metrics and health on port %d", self.endpoints.port)
        operating = asyncio.create_task(self._operate())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({operating, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                _log.info("stopping")
                await self._finish_passes()
        finally:
            for task in (operating, stopping):
                task.cancel()
            await asyncio.gather(operating, stopping, return_exceptions=True)
            if self.leadership is not None:
                await self.leadership.release()
            await self.endpoints.close()
            await self._api.close()
            await self._lease_api.close()
        if not operating.cancelled() and (error := operating.exception()) is not None:
            raise error

    async def _operate(self) -> None:
        while True:
            try:
                await self._watch_and_act()
            except RightsGrantedError as granted:
                _log.warning("watching from the start: %s", granted)

    async def _watch_and_act(self) -> None:
        settings = self._settings
        resources = await watchable_resources(self._api, settings.namespaces, self._missing_rights)
        view = self._view = ClusterView(self._api, self.cache, resources, settings, self.metrics, self._gangs)
        source = self._source = WatchSource(
            self._configuration,
            resources,
            settings.namespaces,
            view.take_event,
            view.watching_started,
            settings.identity,
        )
        granted = until_granted(self._api, settings.namespaces, self._missing_rights)
        await _together(source.run(), view.run(), self._compete(view), granted)

    async def _compete(self, view: ClusterView) -> None:
        async def lead() -> None:
            await self._lead(view)

        if self.leadership is None:
            await lead()
        else:
            await self.leadership.run(lead)

    async def _lead(self, view: ClusterView) -> None:
        """Act, until cancelled."""
        # What an earlier leader wrote is in it.
        await view.list_everything()
        events = EventRecorder(self._api, self._settings.identity)
        layers = StageLayers(self.cache, self._changed)
        troubles = PodTroubles(self._api, self.cache, self._changed)
        setting = _planner_setting(self._settings)
        claims = Claims(self._api, self._settings.lease)
        parts = (view, setting, events, self.metrics, layers, troubles, claims, self._gangs, self._missing_rights)
        reconciler = Reconciler(self._api, self.cache, *parts)
        workers = self._workers = Workers(self.queue, reconciler.reconcile, self.cache, events, self.metrics)
        autoscaler = Autoscaler(self._api, self.cache, events, claims)
        self._is_acting = True
        for key in self.cache.model_keys():
            self.queue.add(key)
        try:
            passes = (workers.run() for _ in range(self._settings.workers))
            await _together(events.run(), layers.run(), troubles.run(), autoscaler.run(), self._gangs.run(), *passes)
        finally:
            self._is_acting = False
            self._workers = None
            self.queue.clear()

    async def _finish_passes(self) -> None:
        if self._workers is not None:
            self._workers.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_PASSES_SECONDS):
                    await self._workers.idle()

    def _changed(self, key: ModelKey) -> None:
        if self._is_acting:
            self.queue.add(key)

    def _check(self, what: str) -> None:
        if self.leadership is not None:
            self.leadership.check(what)
        self._before_write(what)

    def _unhealthy(self) -> str:
        longest = self._longest_pass_seconds()
        return f"a pass has been running for {longest:.0f} s" if longest > STUCK_SECONDS else ""

    def _longest_pass_seconds(self) -> float:
        return 0.0 if self._workers is None else self._workers.longest_pass_seconds()

    def _unready(self) -> str:
        if self._view is None or self._source is None or not self._view.synced.is_set():
            return "the cluster has not been listed yet"
        # Without a watch a replica hears of changes minutes late, and a leader reacts to them as late.
        return self._source.problem()

    def _readings(self) -> Iterator[Reading]:
        yield names.QUEUE_DEPTH, (), float(len(self.queue))
        yield names.LEADER, (), float(self._is_acting)
        yield names.LONGEST_PASS, (), self._longest_pass_seconds()
        for namespace in self._settings.gateway_urls:
            yield names.GATEWAY_EXPECTED, (namespace,), 1.0
        for plural, seconds in ({} if self._view is None else self._view.ages_seconds()).items():
            yield names.WATCH_AGE, (plural,), seconds


def _planner_setting(settings: OperatorSettings) -> Setting:
    return Setting(
        settings.default_image,
        operator=component_peers("operator", settings.own_namespace),
        metrics_from=settings.metrics_from,
        gateway_urls=settings.gateway_urls,
        tracing_env=settings.tracing_env,
        pod_host=PodHost(gpu_runtime_class=settings.gpu_runtime_class),
        vllm_images=VllmImages(stage=settings.vllm_image, files=settings.vllm_files_image),
    )


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all; the first failure ends all and is raised as it is."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
