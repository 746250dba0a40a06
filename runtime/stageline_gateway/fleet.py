"""The gateway's side towards the groups: discovery feeds backends, probes check them, runs are looked over.

Each namespace has a fleet of its own, with its own watch, key, probes and runs: one that can't be read, or whose
engines are sick, keeps no other from being served. `running` starts what keeps watch and ends it again; requests go
through `dispatcher`.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from stageline_api.endpoints import Endpoints
from stageline_gateway.engine_client.engine_calls import EngineCalls
from stageline_gateway.engine_client.engine_connections import get
from stageline_gateway.engine_client.generation import EngineClient, EngineTimeouts
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import EngineTrust
from stageline_gateway.groups.backends import Backends, DiscoveredGroups
from stageline_gateway.groups.discovery_file import EndpointsFile
from stageline_gateway.groups.probing import Prober
from stageline_gateway.groups.watching import run_forever
from stageline_gateway.relay.dispatch import Dispatcher
from stageline_gateway.relay.placement import RetryPolicy, Runs
from stageline_gateway.served_models import ServedModel, ServedModels
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.telemetry.metrics import GatewayMetrics, ModelMetrics


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
    """The groups of one namespace, and what asks their engines: with that namespace's key and no other's."""

    dispatcher: Dispatcher
    discovery: Discovery
    prober: Prober
    calls: EngineCalls

    @property
    def discovered(self) -> DiscoveredGroups:
        return self.dispatcher.backends.discovered

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.discovery.refresh()
        watches = {"what is served": self.discovery.run, "engines": self.prober.run}
        if self.prober.trust.is_given:
            watches["authorities of engines"] = self.prober.trust.watch
        tasks = [asyncio.create_task(run_forever(name, watch)) for name, watch in watches.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.dispatcher.engine.close()
            await self.calls.aclose()


@dataclass(frozen=True, slots=True)
class Fleets:
    """All that a gateway serves: a fleet for each namespace, none of which knows of the others."""

    by_namespace: Mapping[str, Fleet]
    """On one machine a single one, whose namespace is empty."""
    served: ServedModels

    @property
    def why_unread(self) -> str:
        """Why nobody can be told yet what is served; empty once one could be read, and of every other the problem."""
        discovered = [fleet.discovered for fleet in self.by_namespace.values()]
        if any(one.ever_read for one in discovered) and all(one.ever_read or one.problem for one in discovered):
            return ""
        return " ".join(one.why_unread for one in discovered if not one.ever_read)

    def dispatcher_of(self, model: ServedModel) -> Dispatcher:
        return self.by_namespace[model.namespace].dispatcher

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for fleet in self.by_namespace.values():
                await stack.enter_async_context(fleet.running())
            yield


def build_fleets(settings: GatewaySettings, metrics: GatewayMetrics) -> Fleets:
    """The fleets that `settings` describe. Call it where an event loop will run them."""
    namespaces = ("",) if settings.endpoints_path is not None else settings.namespaces
    fleets = {name: _build_fleet(settings, metrics.of(name), name) for name in namespaces}
    return Fleets(fleets, ServedModels({name: fleet.discovered for name, fleet in fleets.items()}))


def _build_fleet(settings: GatewaySettings, metrics: ModelMetrics, namespace: str) -> Fleet:
    key = EngineKey()
    key.take(settings.engine_keys)
    trust = EngineTrust(settings.engine_authority)
    path = settings.endpoints_path
    source = f"namespace {namespace}" if path is None else f"endpoints file {path}"
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
    client = EngineClient(timeouts, key, trust)
    dispatcher = Dispatcher(backends, client, runs, metrics, retry)
    intervals = (settings.probe_interval_seconds, settings.probe_timeout_seconds)
    prober = Prober(backends, *intervals, partial(get, trust), runs.heard_since, look_over, key, trust)
    discovery = _discovery(settings, namespace, discovered, key)
    metrics.discovery_age.set_function(discovery.age_seconds)
    limits = (settings.connect_timeout_seconds, settings.call_timeout_seconds, settings.retry_after_seconds)
    calls = EngineCalls(key, trust, *limits)
    return Fleet(dispatcher, discovery, prober, calls)


def _discovery(settings: GatewaySettings, namespace: str, discovered: DiscoveredGroups, key: EngineKey) -> Discovery:
    if settings.endpoints_path is not None:
        return EndpointsFile(settings.endpoints_path, discovered, settings.poll_seconds)
    # Imported only where it is used: on one machine no Kubernetes client is needed.
    from stageline_gateway.groups.discovery_kubernetes import KubernetesDiscovery

    return KubernetesDiscovery(namespace, discovered, settings.relist_seconds, key)
