"""Asks every engine, twice in a probe period, whether it takes requests, and gives it half a period to answer.

So an engine whose machine vanished, which answers nothing at all any more, is out of use within one probe period,
whenever in it that was. An engine that sends tokens meanwhile is alive, however busy: it isn't called silent.

The question is `GET /readyz`, which costs an engine nothing and never passes its queue. The answer must come from the
engine that discovery speaks of: an address can belong to another pod by now, of another model, another group or a later
incarnation. What ran on the engine that was there before is gone.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import httpx
from pydantic import ValidationError

from stageline_api.endpoints import GroupEndpoint
from stageline_api.health import EngineStatus, Phase
from stageline_gateway.groups.backends import SILENT, Backends
from stageline_gateway.groups.routing import identity

READY_PATH: Final = "/readyz"
UNREACHABLE: Final = "its engine can't be reached"
ANOTHER_MODEL: Final = "its address belongs to another model's engine by now"
ANOTHER_GROUP: Final = "its address belongs to the engine of another group or incarnation by now"
NOT_THERE: Final = frozenset({UNREACHABLE, ANOTHER_MODEL, ANOTHER_GROUP})
"""What says that the engine itself is no more."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found. `failure` is empty when the engine takes requests."""

    failure: str = ""
    drains: bool = False
    queue_room: int | None = None
    """How many more requests may wait there, if the engine says so."""


@dataclass(slots=True)
class Prober:
    """Keeps `backends` informed. `on_round` is called in every interval, and at once when a probe found news."""

    backends: Backends
    interval_seconds: float
    timeout_seconds: float
    heard_since: Callable[[str, float], bool] = lambda _key, _at: False
    """Whether a group, by identity, has sent anything since a moment of the loop's clock."""
    on_round: Callable[[], None] = lambda: None
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
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
            found = await _ask(client, group, self.timeout_seconds)
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
        if found.queue_room is not None:
            self.backends.queue_rooms[key] = found.queue_room
        return self.backends.probed(group, found.failure, found.drains)


async def _ask(client: httpx.AsyncClient, group: GroupEndpoint, timeout_seconds: float) -> Finding:
    try:
        async with asyncio.timeout(timeout_seconds):
            answer = await client.get(group.url + READY_PATH)
        status = EngineStatus.model_validate_json(answer.content)
    except (TimeoutError, httpx.TimeoutException):  # connecting too: a busy machine is slow at that as well
        return Finding(SILENT)
    except (httpx.HTTPError, httpx.InvalidURL):
        return Finding(UNREACHABLE)
    except ValidationError:
        return Finding("what answers at its address is not an engine")
    if status.served_name != group.model:
        return Finding(ANOTHER_MODEL)
    if not _is_of(group, status):
        return Finding(ANOTHER_GROUP)
    if status.phase is Phase.READY:
        return Finding(queue_room=status.queue_room)
    why = f"its engine says {status.phase}: {status.message}".rstrip(": ")
    return Finding(why, drains=status.phase is Phase.DRAINING)


def _is_of(group: GroupEndpoint, status: EngineStatus) -> bool:
    """Whether an engine is that of `group`. One that doesn't say is believed."""
    return status.group in (None, group.group) and status.incarnation in (None, group.incarnation)
