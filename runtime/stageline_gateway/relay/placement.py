"""Where a request goes next, and how long it waits for that.

A request that was never admitted waits only for a group to become ready, shortly. One that was admitted has been
acknowledged: it waits as long as the resume window lasts, counted from when the last engine that admitted it or sent
it tokens failed it. A group that failed it is asked again after a pause that grows, only when no other can take it, and
only in that time: so time alone bounds how often a group that can't be reached is tried.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, assert_never

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import HIGHEST_PRIORITY, Admitted, Delta, Finished, GenerateRequest
from stageline_gateway.engine_client.engine_connection import EngineConnection
from stageline_gateway.engine_client.generation import EngineEvent, EngineLostError, LossKind
from stageline_gateway.errors import ApiError, answer_broken, not_ready, revision_replaced
from stageline_gateway.groups.backends import SILENT, Backends
from stageline_gateway.groups.probing import NOT_THERE
from stageline_gateway.groups.routing import choose, identity, why_not_ready

MOST_ID_CHARACTERS = 128


@dataclass(slots=True)
class Progress:
    """One choice, over all the engines that worked on it."""

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    """All that were relayed."""
    characters: int = 0
    """Of text that were relayed."""
    admissions: int = 0
    """Engines that admitted it."""
    revision: str = ""
    """Of the group that the tokens came from: others may answer differently."""
    runs: int = 0
    """Engines it was sent to."""
    losses: int = 0
    """Engines that had got it and were lost."""

    @property
    def is_admitted(self) -> bool:
        """Whether it was acknowledged, by whichever engine."""
        return self.admissions > 0

    @property
    def has_output(self) -> bool:
        """Whether anything was relayed, so that starting again would repeat it."""
        return bool(self.token_ids) or self.characters > 0

    def next_request(self) -> GenerateRequest:
        """What to ask the next engine, under an id of its own: the last engine may still hold the other."""
        self.runs += 1
        if self.runs == 1:
            return self.request
        suffix = f".{self.runs}"
        update = {
            "request_id": self.request.request_id[: MOST_ID_CHARACTERS - len(suffix)] + suffix,
            "priority": max(HIGHEST_PRIORITY, self.request.priority - 1),
        }
        if self.has_output:
            update |= {"generated_token_ids": tuple(self.token_ids), "generated_characters": self.characters}
        return self.request.model_copy(update=update)

    def take(self, event: EngineEvent, revision: str) -> bool:
        """Account for an event of a group of `revision`; returns whether the client is to see it."""
        match event:
            case Admitted():
                self.admissions += 1
                return self.admissions == 1
            case Delta(text=text, token_ids=token_ids):
                self.revision = revision
                self.token_ids.extend(token_ids)
                self.characters += len(text)
            case Finished():
                pass
            case _:
                assert_never(event)
        return True


LOOK_AGAIN_SECONDS: Final = 0.1
"""Circuits and pauses end without telling anybody."""
FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a request is tried."""

    hold_seconds: float = 30.0
    """While no group of its model is ready, before it was admitted."""
    resume_window_seconds: float | None = None
    """After its group failed, once it was admitted. None: what its model's `timeouts.resumeWindowSeconds` says."""
    most_losses: int = 8
    """Engines that had got one request and may be lost before it is given up: it might be what kills them."""
    retry_after_seconds: float = 2.0


@dataclass(slots=True)
class Search:
    """The groups one choice of a request is sent to."""

    backends: Backends
    model: str
    progress: Progress
    affinity: str
    retry: RetryPolicy
    failure: ApiError | None = None
    """Of the last group."""
    _worth_waiting: bool = True
    _since_seconds: float = 0.0
    _reached: tuple[int, int] = (0, 0)
    """Admissions and tokens at the last failure."""
    _asked_again_at: dict[str, float] = field(default_factory=dict)
    _pauses: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._since_seconds = self.backends.clock()

    async def next_group(self) -> GroupEndpoint:
        """The group to send it to, as soon as there is one; raises ApiError when there is none in time."""
        while True:
            left_seconds = self._since_seconds + self._window_seconds - self.backends.clock()
            if (group := self._choose(may_repeat=left_seconds > 0)) is not None:
                return group
            if left_seconds <= 0:
                raise self._why_none()
            await self.backends.changed(min(left_seconds, LOOK_AGAIN_SECONDS))

    def failed(self, group: GroupEndpoint, failure: ApiError, worth_waiting: bool) -> None:
        """`group` did not finish it. Without `worth_waiting` a request that wasn't admitted goes elsewhere or ends."""
        now, key = self.backends.clock(), identity(group)
        self.failure, self._worth_waiting = failure, worth_waiting
        reached = (self.progress.admissions, len(self.progress.token_ids))
        if reached != self._reached:
            self._reached, self._since_seconds = reached, now
        pause_seconds = self._pauses.get(key, FIRST_PAUSE_SECONDS)
        self._asked_again_at[key] = now + pause_seconds
        self._pauses[key] = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

    @property
    def _window_seconds(self) -> float:
        if self.progress.is_admitted:
            return self._resume_window_seconds
        return self.retry.hold_seconds if self._worth_waiting else 0.0

    @property
    def _resume_window_seconds(self) -> float:
        set_for_all = self.retry.resume_window_seconds
        return self.backends.discovered.resume_window_seconds(self.model) if set_for_all is None else set_for_all

    def _choose(self, may_repeat: bool) -> GroupEndpoint | None:
        """One that hasn't failed it yet; else, with `may_repeat`, one that has and has been left alone since."""
        now, progress = self.backends.clock(), self.progress
        able = [
            group
            for group in self.backends.candidates(self.model)
            if not progress.has_output or group.revision == progress.revision
        ]
        fresh = [group for group in able if identity(group) not in self._asked_again_at]
        rested = [group for group in able if may_repeat and self._asked_again_at.get(identity(group), now) <= now]
        return choose(fresh or rested, self.backends.ledger.loads, self.affinity)

    def _why_none(self) -> ApiError:
        groups = self.backends.groups_of(self.model)
        if self.progress.has_output:
            if self._is_replaced(groups):
                return revision_replaced(self._resume_window_seconds, self.retry.retry_after_seconds)
            reason = self.failure.message if self.failure is not None else ""
            window = f"within {self._resume_window_seconds:g} s"
            return answer_broken(f"{reason} No group of its revision could continue the answer {window}.".lstrip())
        if self.failure is not None:
            return self.failure
        return not_ready(why_not_ready(self.model, groups), self.retry.retry_after_seconds)

    def _is_replaced(self, groups: Sequence[GroupEndpoint]) -> bool:
        """Whether the model is served by other revisions now, and by none that may continue the answer."""
        staying = {group.revision for group in groups if not group.draining}
        return bool(staying) and self.progress.revision not in staying


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
        known = {identity(group) for group in self.backends.discovered.current.groups}
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
