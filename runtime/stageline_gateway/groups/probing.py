"""Asks every engine, twice in a probe period, whether it takes requests, and gives it half a period to answer.

So an engine whose machine vanished, which answers nothing at all any more, is out of use within one probe period,
whenever in it that was. An engine that sends tokens meanwhile is alive, however busy: it isn't called silent.

The question is `GET /readyz`, which costs an engine nothing and never passes its queue. The answer must come from the
engine that discovery speaks of: an address can belong to another pod by now, of another model, another group or a later
incarnation. What ran on the engine that was there before is gone. Where a model has several groups, engines that know
are asked by `GET /v1/prefixes` too, which beginnings of prompts their caches hold.
"""

import asyncio
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import httpx
from pydantic import ValidationError

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import HeldPrefixes
from stageline_api.health import EngineStatus, Phase
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import NO_AUTHORITY, EngineTrust, by_name
from stageline_gateway.groups.backends import SILENT, Backends
from stageline_gateway.groups.routing import EngineAccount, identity

READY_PATH: Final = "/readyz"
PREFIXES_PATH: Final = "/v1/prefixes"
UNREACHABLE: Final = "its engine can't be reached"
NOT_TRUSTED: Final = "its engine's certificate is not accepted: is its authority in --engine-authority?"
ANOTHER_MODEL: Final = "its address belongs to another model's engine by now"
ANOTHER_GROUP: Final = "its address belongs to the engine of another group or incarnation by now"
NOT_THERE: Final = frozenset({UNREACHABLE, ANOTHER_MODEL, ANOTHER_GROUP})
"""What says that the engine itself is no more."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found. `failure` is empty when the engine takes requests."""

    failure: str = ""
    drains: bool = False
    status: EngineStatus | None = None
    """What the engine said of itself, if it takes requests."""
    held: Set[str] = frozenset()
    """The names of beginnings of prompts in its cache, where it was asked for them."""


@dataclass(slots=True)
class Prober:
    """Keeps `backends` informed. `on_round` is called in every interval, and at once when a probe found news."""

    backends: Backends
    interval_seconds: float
    timeout_seconds: float
    heard_since: Callable[[str, float], bool] = lambda _key, _at: False
    """Whether a group, by identity, has sent anything since a moment of the loop's clock."""
    on_round: Callable[[], None] = lambda: None
    key: EngineKey = field(default_factory=EngineKey)
    trust: EngineTrust = field(default_factory=EngineTrust)
    """Shown where more is asked than whether requests are taken."""
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # Within a probe's own limit: httpx closes what it gives up by itself, not what is cancelled in a TLS handshake.
        timeout = httpx.Timeout(None, connect=0.9 * self.timeout_seconds)
        secure = self.trust.context
        async with httpx.AsyncClient(verify=secure, timeout=timeout, limits=limits, trust_env=False) as client:
            try:
                while True:
                    self._follow(client)
                    await asyncio.sleep(self.interval_seconds)
                    self.on_round()
            finally:
                await self._end(list(self._asking))

    def _follow(self, client: httpx.AsyncClient) -> None:
        """One task for each group: an engine that is slow to answer must not keep the others from being asked.

        Also for one that discovery calls unready while requests run there: it may tell that it drains.
        """
        loads = self.backends.ledger.loads
        groups = {identity(group): group for group in self.backends.discovered.current.groups if group.url}
        wanted = {key for key, group in groups.items() if group.ready or (key in loads and loads[key].requests)}
        for key in self._asking.keys() - wanted:
            self._asking.pop(key).cancel()
        for key in wanted:
            if key not in self._asking or self._asking[key].done():
                self._asking[key] = asyncio.create_task(self._keep_asking(client, groups[key]))

    async def _end(self, keys: list[str]) -> None:
        tasks = [self._asking.pop(key) for key in keys]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_asking(self, client: httpx.AsyncClient, group: GroupEndpoint) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            is_alone = len(self.backends.discovered.groups_of(group.model)) < 2
            if group.tls_name and not self.trust.is_given:
                found = Finding(NO_AUTHORITY)
            else:
                found = await _ask(client, group, self.timeout_seconds, is_alone, self.key.headers)
            if self._take(group, found, asked_at):
                self.on_round()
            await asyncio.sleep(max(0.0, asked_at + self.interval_seconds - loop.time()))

    def _take(self, group: GroupEndpoint, found: Finding, asked_at: float) -> bool:
        """Tell `backends`; returns whether anything changed."""
        key = identity(group)
        if found.failure == SILENT and self.heard_since(key, asked_at):
            if self.backends.probe_failures.get(key) != SILENT:
                return False
            found = Finding()
        if found.status is not None:
            self._note(key, found.status, found.held)
        return self.backends.probed(group, found.failure, found.drains)

    def _note(self, key: str, status: EngineStatus, held: Set[str]) -> None:
        if status.queue_room is not None:
            self.backends.queue_rooms[key] = status.queue_room
        load = self.backends.ledger.loads.get(key)
        there = status.requests_running + status.requests_waiting
        account = EngineAccount(
            slots=status.slots,
            from_others=max(0, there - (load.requests if load is not None else 0)),
            tells_prefixes=status.tells_prefixes,
            multiplexes=status.multiplexes,
            held=held,
            weights=status.weights,
        )
        self.backends.accounts.take(key, account, self.backends.clock())


async def _ask(
    client: httpx.AsyncClient,
    group: GroupEndpoint,
    timeout_seconds: float,
    is_alone: bool = True,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Finding:
    try:
        async with asyncio.timeout(timeout_seconds):
            answer = await client.get(group.url + READY_PATH, extensions=by_name(group.tls_name))
            status = EngineStatus.model_validate_json(answer.content)
            held = frozenset() if is_alone or not status.tells_prefixes else await _held(client, group, headers)
    except (TimeoutError, httpx.TimeoutException):  # connecting too: a busy machine is slow at that as well
        return Finding(SILENT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Finding(NOT_TRUSTED if "CERTIFICATE_VERIFY_FAILED" in str(error) else UNREACHABLE)
    except ValidationError:
        return Finding("what answers at its address is not an engine")
    if status.served_name != group.model:
        return Finding(ANOTHER_MODEL)
    if not _is_of(group, status):
        return Finding(ANOTHER_GROUP)
    if status.phase is Phase.READY:
        return Finding(status=status, held=held)
    why = f"its engine says {status.phase}: {status.message}".rstrip(": ")
    return Finding(why, drains=status.phase is Phase.DRAINING)


async def _held(client: httpx.AsyncClient, group: GroupEndpoint, headers: Mapping[str, str]) -> frozenset[str]:
    answer = await client.get(group.url + PREFIXES_PATH, headers=headers, extensions=by_name(group.tls_name))
    return frozenset(HeldPrefixes.model_validate_json(answer.content).keys)


def _is_of(group: GroupEndpoint, status: EngineStatus) -> bool:
    """Whether an engine is that of `group`. One that doesn't say is believed."""
    return status.group in (None, group.group) and status.incarnation in (None, group.incarnation)
