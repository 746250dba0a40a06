"""Asks every engine, twice in a probe period, whether it accepts requests, with half a period to answer.

So an engine on a vanished machine, which doesn't answer at all, is out of use within one probe period. An engine that
sends tokens in that time is alive, however busy: it doesn't count as silent.

The probe is `GET /readyz`, which costs an engine nothing and bypasses its queue. The answer must come from the engine
that discovery lists: by now an address can belong to another pod, of another model, another group or a later
incarnation. Runs on the previous engine are lost. If a model has several groups, engines that support it are also asked
by `GET /v1/prefixes` which prompt prefixes their caches hold.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import HeldPrefixes, UnreadableError
from stageline_api.health import EngineStatus, Phase
from stageline_gateway.engine_key import EngineKey
from stageline_gateway.engine_trust import NO_AUTHORITY, EngineAddress, EngineTrust
from stageline_gateway.groups.backends import SILENT, Backends
from stageline_gateway.groups.routing import EngineAccount, identity

READY_PATH: Final = "/readyz"
PREFIXES_PATH: Final = "/v1/prefixes"
UNREACHABLE: Final = "its engine can't be reached"
NOT_TRUSTED: Final = "its engine's certificate is not accepted: is its authority in --engine-authority?"
NO_ENGINE: Final = "what answers at its address is not an engine"
ANOTHER_MODEL: Final = "its address belongs to another model's engine by now"
ANOTHER_GROUP: Final = "its address belongs to the engine of another group or incarnation by now"
NOT_THERE: Final = frozenset({UNREACHABLE, ANOTHER_MODEL, ANOTHER_GROUP})
"""What says that the engine itself is no more."""


Get = Callable[[EngineAddress, str, str], Awaitable[bytes]]
"""The body of what an engine answers to a GET of a path, with a value of the `Authorization` header or with none.
Raises OSError and ValueError."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found. `failure` is empty when the engine takes requests."""

    failure: str = ""
    drains: bool = False
    status: EngineStatus | None = None
    """What the engine said of itself, if it takes requests."""
    held: Set[str] = frozenset()
    """The names of prompt prefixes in its cache, if it was asked for them."""


@dataclass(slots=True)
class Prober:
    """Keeps `backends` informed, of a new group at once. `on_round` is called in every interval and at news."""

    backends: Backends
    interval_seconds: float
    timeout_seconds: float
    get: Get
    heard_since: Callable[[str, float], bool] = lambda _key, _at: False
    """Whether a group, by identity, has sent anything since a moment of the loop's clock."""
    on_round: Callable[[], None] = lambda: None
    key: EngineKey = field(default_factory=EngineKey)
    """Shown where more is asked than whether requests are taken."""
    trust: EngineTrust = field(default_factory=EngineTrust)
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        try:
            while True:
                self._follow()
                await self.backends.changed(self.interval_seconds)
                self.on_round()
        finally:
            await self._end(list(self._asking))

    def _follow(self) -> None:
        """One task for each group: a slow engine must not delay the probes of the others.

        Also for a group that discovery lists as unready while requests run there: it may report that it drains.
        """
        loads = self.backends.ledger.loads
        groups = {identity(group): group for group in self.backends.discovered.current.groups if group.url}
        wanted = {key for key, group in groups.items() if group.ready or (key in loads and loads[key].requests)}
        for key in self._asking.keys() - wanted:
            self._asking.pop(key).cancel()
        for key in wanted:
            if key not in self._asking or self._asking[key].done():
                self._asking[key] = asyncio.create_task(self._keep_asking(groups[key]))

    async def _end(self, keys: list[str]) -> None:
        tasks = [self._asking.pop(key) for key in keys]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_asking(self, group: GroupEndpoint) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            is_alone = len(self.backends.discovered.groups_of(group.model)) < 2
            if group.tls_name and not self.trust.is_given:
                found = Finding(NO_AUTHORITY)
            else:
                found = await self._ask(group, is_alone)
            if self._take(group, found, asked_at):
                self.on_round()
            await asyncio.sleep(max(0.0, asked_at + self.interval_seconds - loop.time()))

    async def _ask(self, group: GroupEndpoint, is_alone: bool) -> Finding:
        engine, held = EngineAddress(group.url, group.tls_name), frozenset[str]()
        try:
            async with asyncio.timeout(self.timeout_seconds):
                status = EngineStatus.model_validate_json(await self.get(engine, READY_PATH, ""))
                if not is_alone:
                    told = await self.get(engine, PREFIXES_PATH, self.key.authorization)
                    held = frozenset(HeldPrefixes.from_json(told).keys)
        except TimeoutError:  # connecting too: a busy machine is slow at that as well
            return Finding(SILENT)
        except (ValidationError, UnreadableError):
            return Finding(NO_ENGINE)
        except ssl.SSLCertVerificationError:
            return Finding(NOT_TRUSTED)
        except (OSError, ValueError):
            return Finding(UNREACHABLE)
        return _judged(group, status, held)

    def _take(self, group: GroupEndpoint, found: Finding, asked_at: float) -> bool:
        """Tell `backends`; returns whether anything changed."""
        key = identity(group)
        if found.failure == SILENT and self.heard_since(key, asked_at):
            if self.backends.probe_failures.get(key) != SILENT:
                return False
            found = Finding()
        is_first = found.status is not None and key not in self.backends.accounts.known
        if found.status is not None:
            self._note(key, found.status, found.held)
        is_news = self.backends.probed(group, found.failure, found.drains)
        if is_first and not is_news:
            self.backends.notify()  # an answer may have waited to hear what it computes with
        return is_news or is_first

    def _note(self, key: str, status: EngineStatus, held: Set[str]) -> None:
        if status.queue_room is not None:
            self.backends.queue_rooms[key] = status.queue_room
        load = self.backends.ledger.loads.get(key)
        there = status.requests_running + status.requests_waiting
        account = EngineAccount(
            slots=status.slots,
            from_others=max(0, there - (load.requests if load is not None else 0)),
            held=held,
            weights=status.weights,
        )
        self.backends.accounts.take(key, account, self.backends.clock())


def _judged(group: GroupEndpoint, status: EngineStatus, held: Set[str]) -> Finding:
    """What follows from what an engine says of itself."""
    if status.served_name != group.model:
        return Finding(ANOTHER_MODEL)
    if not _is_of(group, status):
        return Finding(ANOTHER_GROUP)
    if status.phase is Phase.READY:
        return Finding(status=status, held=held)
    why = f"its engine says {status.phase}: {status.message}".rstrip(": ")
    return Finding(why, drains=status.phase is Phase.DRAINING)


def _is_of(group: GroupEndpoint, status: EngineStatus) -> bool:
    """Whether an engine is that of `group`. One that doesn't say is believed."""
    return status.group in (None, group.group) and status.incarnation in (None, group.incarnation)
