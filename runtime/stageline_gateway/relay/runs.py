"""The runs that are under way, one for each request on an engine, and which of them should leave it.

Looked over in every period of the probes and at every change of discovery. A run leaves

- an engine that is gone, by discovery or because another answers at its address, once it has been silent for a moment:
  the connection of a machine that vanished never breaks by itself;
- one that is silent to its probe as well, when that has lasted a probe period, if another group can go on. Where none
  can there is nothing to gain: the machine may only be busy, and go on itself;
- a group that drains, if another can take it and has room in its queue: at once while it only waits in the queue, else
  when the drain has lasted too long. As many leave as there is room for: the others may end where they are, and nowhere
  else.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stageline_api.endpoints import GroupEndpoint
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.generation import EngineLostError, LossKind
from stageline_gateway.groups.backends import SILENT, Backends
from stageline_gateway.groups.probing import NOT_THERE
from stageline_gateway.groups.routing import identity
from stageline_gateway.relay.resume import Progress

GONE = "The engine is gone."
STALLED = "The engine is silent, and does not answer its probe."
LEFT = "The engine drains, and another group takes over."


@dataclass(eq=False, slots=True)
class Run:
    """One request on one group."""

    group: GroupEndpoint
    progress: Progress
    connection: EngineConnection | None = None
    is_leaving: bool = False

    def opened(self, connection: EngineConnection) -> None:
        """The connection to the engine is there."""
        self.connection = connection


@dataclass(slots=True)
class Runs:
    """All runs. How long may an engine be silent that is gone, or that is silent to its probe as well?"""

    backends: Backends
    gone_silence_seconds: float = 1.0
    silent_probe_seconds: float = 2.0
    drain_patience_seconds: float = 10.0
    _runs: set[Run] = field(default_factory=set)

    @contextmanager
    def under_way(self, group: GroupEndpoint, progress: Progress) -> Iterator[Run]:
        """A run, while the context lasts."""
        run = Run(group, progress)
        self._runs.add(run)
        try:
            yield run
        finally:
            self._runs.discard(run)

    def heard_since(self, key: str, at: float) -> bool:
        """Whether a group, by identity, has sent anything in any run since a moment of the loop's clock."""
        connections = (run.connection for run in self._runs if identity(run.group) == key)
        return any(connection is not None and connection.heard_at >= at for connection in connections)

    def review(self) -> None:
        """Interrupt the runs that should leave."""
        known = {identity(group) for group in self.backends.served.current.groups}
        for run in tuple(self._runs):
            if run.connection is None or run.is_leaving:
                continue
            if (error := self._why_leave(run, run.connection, known)) is not None:
                run.is_leaving = True
                run.connection.interrupt(error)

    def _why_leave(self, run: Run, connection: EngineConnection, known: Collection[str]) -> EngineLostError | None:
        key = identity(run.group)
        is_gone = key not in known or self.backends.probe_failures.get(key) in NOT_THERE
        if is_gone and connection.silent_seconds >= self.gone_silence_seconds:
            return EngineLostError(LossKind.GONE, GONE)
        others = self._others(run)
        if not others:
            return None
        is_silent = self.backends.probe_failures.get(key) == SILENT
        if is_silent and connection.silent_seconds >= self.silent_probe_seconds:
            return EngineLostError(LossKind.STALLED, STALLED)
        since = self.backends.draining_since.get(key)
        if since is None or not any(map(self.backends.has_room, others)):
            return None
        if not run.progress.has_output or self.backends.clock() - since >= self.drain_patience_seconds:
            self.backends.take_room(others)
            return EngineLostError(LossKind.LEFT, LEFT)
        return None

    def _others(self, run: Run) -> list[str]:
        """Groups that could take it over, by identity."""
        others = self.backends.candidates(run.group.model, {identity(run.group)})
        return [
            identity(other)
            for other in others
            if not run.progress.has_output or other.revision == run.progress.revision
        ]
