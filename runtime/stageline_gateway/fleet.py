"""The gateway's side towards the groups: discovery feeds backends, probes check them, runs are looked over.

`running` starts what keeps watch and ends it again; requests go through `dispatcher`.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from stageline_api.endpoints import Endpoints
from stageline_gateway.engine_client.generation import EngineClient, EngineTimeouts
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.groups.backends import Backends, DiscoveredGroups
from stageline_gateway.groups.discovery_file import EndpointsFile
from stageline_gateway.groups.probing import Prober
from stageline_gateway.groups.watching import run_forever
from stageline_gateway.relay.dispatch import Dispatcher
from stageline_gateway.relay.placement import RetryPolicy, Runs
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.telemetry.metrics import GatewayMetrics


class Discovery(Protocol):
    """Keeps `DiscoveredGroups` up to date."""

    def age_seconds(self) -> float:
        """Since what is served was last confirmed."""

    def refresh(self) -> None:
        """Read what can be read without waiting."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Keep watch until cancelled."""


@dataclass(frozen=True, slots=True)
class Fleet:
    dispatcher: Dispatcher
    discovery: Discovery
    prober: Prober

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.discovery.refresh()
        watches = {"what is served": self.discovery.run, "engines": self.prober.run}
        tasks = [asyncio.create_task(run_forever(name, watch)) for name, watch in watches.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def build_fleet(settings: GatewaySettings, metrics: GatewayMetrics, key: EngineKey) -> Fleet:
    """The fleet that `settings` describe. Call it where an event loop will run it. Engines are shown `key`."""
    path = settings.endpoints_path
    source = f"namespace {settings.namespace}" if path is None else f"endpoints file {path}"
    discovered = DiscoveredGroups(source, on_problem=metrics.endpoints_stale.set)
    backends = Backends(discovered)
    period_seconds = settings.probe_interval_seconds + settings.probe_timeout_seconds
    runs = Runs(backends, silent_probe_seconds=period_seconds, drain_patience_seconds=settings.drain_patience_seconds)

    def changed(endpoints: Endpoints) -> None:
        backends.take(endpoints)
        look_over()

    def look_over() -> None:
        models = discovered.models()
        metrics.show_groups(
            {model: [group.ready for group in backends.groups_of(model)] for model in models},
            {model: backends.open_breakers(model) for model in models},
        )
        runs.review()

    discovered.on_change = changed
    timeouts = EngineTimeouts(
        settings.connect_timeout_seconds, settings.idle_timeout_seconds, settings.stall_timeout_seconds
    )
    retry = RetryPolicy(
        hold_seconds=settings.hold_seconds,
        start_hold_seconds=settings.start_hold_seconds,
        resume_window_seconds=settings.resume_window_seconds,
        most_losses=settings.most_losses,
        retry_after_seconds=settings.retry_after_seconds,
    )
    dispatcher = Dispatcher(backends, EngineClient(timeouts, key), runs, metrics, retry)
    intervals = (settings.probe_interval_seconds, settings.probe_timeout_seconds)
    prober = Prober(backends, *intervals, runs.heard_since, look_over, key)
    discovery = _discovery(settings, discovered, key)
    metrics.discovery_age.set_function(discovery.age_seconds)
    return Fleet(dispatcher, discovery, prober)


def _discovery(settings: GatewaySettings, discovered: DiscoveredGroups, key: EngineKey) -> Discovery:
    if settings.endpoints_path is not None:
        return EndpointsFile(settings.endpoints_path, discovered, settings.poll_seconds)
    # Imported only where it is used: on one machine no Kubernetes client is needed.
    from stageline_gateway.groups.discovery_kubernetes import KubernetesDiscovery

    return KubernetesDiscovery(settings.namespace, discovered, settings.relist_seconds, key)
