"""The operator process: creates its parts, and starts and stops them in order.

All replicas watch; only the lease holder acts. A new leader lists the whole cluster before its first pass.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from kubernetes.aio.client import Configuration

from stageline_kubernetes.client import KubeApi
from stageline_operator.controller.client.resources import RESOURCE_OF_KIND, ModelKey
from stageline_operator.controller.lead.leader import Leadership
from stageline_operator.controller.loop.autoscaler import Autoscaler
from stageline_operator.controller.loop.cluster_view import ClusterView
from stageline_operator.controller.loop.event_recorder import EventRecorder
from stageline_operator.controller.loop.reconciler import Reconciler
from stageline_operator.controller.loop.work_queue import WorkQueue
from stageline_operator.controller.loop.workers import Workers
from stageline_operator.controller.settings import FIELD_MANAGER, WRITE_TIMEOUT_SECONDS, OperatorSettings
from stageline_operator.controller.telemetry import metric_names as names
from stageline_operator.controller.telemetry.http_endpoints import HttpEndpoints
from stageline_operator.controller.telemetry.metrics import OperatorMetrics
from stageline_operator.controller.telemetry.model_gauges import Reading
from stageline_operator.controller.view.gang_view import GangView
from stageline_operator.controller.view.model_watch import ModelWatch
from stageline_operator.controller.view.object_cache import ObjectCache
from stageline_operator.controller.view.pod_poller import PodPoller
from stageline_operator.controller.view.unreadable import Unreadable
from stageline_operator.planner.types import PodHost, Setting, VllmImages, component_peers

STUCK_SECONDS: Final = 120.0
_LAST_PASSES_SECONDS: Final = 8.0

_log = logging.getLogger(__name__)


class OperatorProcess:
    """One replica. `before_write` is for tests: it is called before every write and may raise instead."""

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
            WRITE_TIMEOUT_SECONDS,
            before_write=self._check,
            during_write=self._check_lease,
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
            None if settings.lease is None else Leadership(self._lease_api, settings.lease, times, settings.identity)
        )
        self.queue = WorkQueue()
        self.cache = ObjectCache(self._changed)
        self._unreadable = Unreadable()
        self._gangs = GangView(self._api, self.cache, settings.namespaces, self._unreadable)
        seen = (self.metrics, self._gangs, self._unreadable, self._changed)
        self._view = ClusterView(self._api, self.cache, settings, *seen)
        self._workers: Workers | None = None
        self.endpoints = HttpEndpoints(self.metrics.registry, self._unhealthy, self._unready)
        self.metrics.expose(self.cache, self._readings)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`. Raises `UserError` if the metrics port can't be bound."""
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
        watches = (
            ModelWatch(
                self._configuration,
                self._api,
                feed.place.namespace,
                feed.heard,
                feed.watch_failed,
                relist,
                self._settings.identity,
            ).run()
            for feed, relist in self._view.models()
        )
        await _together(self._view.run(), self._compete(), *watches)

    async def _compete(self) -> None:
        if self.leadership is None:
            while not self._view.serves:
                await self._view.next_verdict()
            await self._lead()
        else:
            await self.leadership.run(self._lead, lambda: self._view.serves)

    async def _lead(self) -> None:
        """Act, until cancelled."""
        # The list contains the earlier leader's writes.
        await self._view.list_everything()
        events = EventRecorder(self._api, self._settings.identity)
        poller = PodPoller(self._api, self.cache, self._changed)
        parts = (_planner_setting(self._settings), events, self.metrics, poller)
        reconciler = Reconciler(self._settings, self._api, self.cache, self._view, *parts)
        workers = self._workers = Workers(self.queue, reconciler.reconcile, self.metrics)
        autoscaler = Autoscaler(self._settings, self._api, self.cache, events, poller)
        self._is_acting = True
        for key in self.cache.model_keys():
            self.queue.add(key)
        try:
            passes = (workers.run() for _ in range(self._settings.workers))
            await _together(events.run(), poller.run(), autoscaler.run(), self._gangs.run(), *passes)
        finally:
            self._is_acting = False
            self._workers = None
            self.queue.clear()
            await poller.close()

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
        self._check_lease(what)
        self._before_write(what)

    def _check_lease(self, what: str) -> None:
        if self.leadership is not None:
            self.leadership.check(what)

    def _unhealthy(self) -> str:
        longest = self._longest_pass_seconds()
        return f"a pass has been running for {longest:.0f} s" if longest > STUCK_SECONDS else ""

    def _longest_pass_seconds(self) -> float:
        return 0.0 if self._workers is None else self._workers.longest_pass_seconds()

    def _unready(self) -> str:
        return self._view.problem()

    def _readings(self) -> Iterator[Reading]:
        yield names.QUEUE_DEPTH, (), float(len(self.queue))
        yield names.LEADER, (), float(self._is_acting)
        yield names.LONGEST_PASS, (), self._longest_pass_seconds()
        for namespace in self._settings.gateway_urls:
            yield names.GATEWAY_EXPECTED, (namespace,), 1.0
        for plural, seconds in self._view.ages_seconds().items():
            yield names.WATCH_AGE, (plural,), seconds
        for kind, namespace in self._unreadable.all():
            yield names.UNREADABLE, (namespace, RESOURCE_OF_KIND[kind].plural), 1.0


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
    """Run all; the first failure cancels the others and is raised unchanged."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
