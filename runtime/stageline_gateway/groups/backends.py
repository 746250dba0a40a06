"""Which groups may take a request now: what discovery says, what the last probe found, what requests ran into.

Discovery alone makes a group ready; a probe that it failed or a circuit that is open only takes it out again. So a
backend that is gone is left alone within a probe period even if discovery never hears of its end.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_gateway.engine_client.generation import EngineLostError, LossKind
from stageline_gateway.groups.circuit_breaker import CLOSED, Circuit, CircuitPolicy
from stageline_gateway.groups.discovered_groups import Served
from stageline_gateway.groups.routing import Ledger, identity

SILENT: Final = "its engine does not answer its probe"
"""Not the same as one that can't be reached: nobody says that it is gone. Its machine may have vanished, or be busy."""


@dataclass(slots=True)
class Backends:
    """All that is known of the groups; everything but `served` is keyed by `identity`."""

    served: Served
    ledger: Ledger = field(default_factory=Ledger)
    policy: CircuitPolicy = field(default_factory=CircuitPolicy)
    clock: Callable[[], float] = time.monotonic
    circuits: dict[str, Circuit] = field(default_factory=dict)
    probe_failures: dict[str, str] = field(default_factory=dict)
    """Why the last probe of a group failed, one sentence."""
    draining_since: dict[str, float] = field(default_factory=dict)
    """When a group was first known to drain, from discovery or from its engine."""
    said_to_drain: set[str] = field(default_factory=set)
    """Groups whose engines said so themselves: they never take it back."""
    queue_rooms: dict[str, int] = field(default_factory=dict)
    """How many more requests may wait in a group's queue, by its last probe and what was sent there since because
    another group drains. A group whose engine doesn't say isn't in it."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def groups_of(self, model: str) -> tuple[GroupEndpoint, ...]:
        """All groups of `model`; ready are those that may take a request, the others say why not."""
        return tuple(self._judged(group) for group in self.served.groups_of(model))

    def candidates(self, model: str, excluded: Collection[str] = ()) -> list[GroupEndpoint]:
        """Groups that may take a request of `model` now, but for the excluded identities."""
        return [group for group in self.groups_of(model) if group.ready and identity(group) not in excluded]

    def take(self, endpoints: Endpoints) -> None:
        """Discovery has a new version: forget what isn't in it."""
        known = {identity(group): group for group in endpoints.groups}
        self.ledger.keep(known.keys())
        self.circuits = {key: circuit for key, circuit in self.circuits.items() if key in known}
        self.probe_failures = {key: why for key, why in self.probe_failures.items() if key in known}
        self.queue_rooms = {key: room for key, room in self.queue_rooms.items() if key in known}
        now = self.clock()
        self.said_to_drain &= known.keys()
        draining = {key for key, group in known.items() if group.draining or key in self.said_to_drain}
        self.draining_since = {key: self.draining_since.get(key, now) for key in draining}
        self.tell()

    def probed(self, group: GroupEndpoint, failure: str, drains: bool = False) -> bool:
        """What a probe found; `failure` is empty when the engine takes requests. Returns whether it is news."""
        key = identity(group)
        if drains and key not in self.said_to_drain:
            self.said_to_drain.add(key)
            self.draining_since.setdefault(key, self.clock())
        elif self.probe_failures.get(key, "") == failure:
            return False
        if failure:
            self.probe_failures[key] = failure
        else:
            self.probe_failures.pop(key, None)
        self.tell()
        return True

    def has_room(self, key: str) -> bool:
        """Whether one more request may wait at a group, for all that is known."""
        return self.queue_rooms.get(key, 1) > 0

    def take_room(self, keys: Sequence[str]) -> None:
        """Count a request as waiting at that one of some groups which has the most room, until its next probe."""
        told = [key for key in keys if key in self.queue_rooms]
        if told and len(told) == len(keys):
            self.queue_rooms[max(told, key=self.queue_rooms.__getitem__)] -= 1

    def refused_as_full(self, key: str) -> None:
        """A group's queue is full, its engine says, and so it counts until its next probe."""
        if key in self.queue_rooms:
            self.queue_rooms[key] = 0

    def circuit_of(self, key: str) -> Circuit:
        """A group's circuit."""
        return self.circuits.get(key, CLOSED)

    def set_circuit(self, key: str, circuit: Circuit) -> None:
        """Remember a circuit's next state."""
        if circuit is CLOSED:
            self.circuits.pop(key, None)
        else:
            self.circuits[key] = circuit

    @contextmanager
    def trial(self, key: str) -> Iterator[None]:
        """A request runs on a group; tells its circuit if the engine is lost."""
        self.set_circuit(key, self.circuit_of(key).started(self.clock(), self.policy))
        try:
            yield
        except EngineLostError as error:
            if error.kind is not LossKind.LEFT:
                at_once = error.kind is LossKind.UNREACHABLE
                self.set_circuit(key, self.circuit_of(key).failed(self.clock(), self.policy, at_once))
            raise

    def answered(self, key: str) -> None:
        """A request got a token from a group."""
        if key in self.circuits:
            self.set_circuit(key, self.circuit_of(key).answered())

    def open_circuits(self, model: str) -> int:
        """How many groups of `model` have a circuit that isn't closed."""
        return sum(not self.circuit_of(identity(group)).is_closed for group in self.served.groups_of(model))

    def tell(self) -> None:
        """Wake those who wait for a change."""
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, timeout_seconds: float) -> None:
        """Until something changes or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._news.wait()

    def _judged(self, group: GroupEndpoint) -> GroupEndpoint:
        key = identity(group)
        if key in self.draining_since and not group.draining:
            group = group.model_copy(update={"draining": True})
        if not group.ready:
            return group
        reason = self.probe_failures.get(key, "")
        if not reason and not self.circuit_of(key).admits(self.clock()):
            reason = "its engine failed several requests, and rests"
        return group.model_copy(update={"ready": False, "message": reason}) if reason else group
