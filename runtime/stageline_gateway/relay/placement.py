"""Where a request goes next, and how long it waits for that.

A request that was never admitted waits only for a group to become ready, shortly. One that was admitted has been
acknowledged: it waits as long as the resume window lasts, counted from when the last engine that admitted it or sent
it tokens failed it. A group that failed it is asked again after a pause that grows, only when no other can take it, and
only in that time: so time alone bounds how often a group that can't be reached is tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from stageline_api.endpoints import GroupEndpoint
from stageline_gateway.errors import ApiError, answer_broken, not_ready, revision_replaced
from stageline_gateway.groups.backends import Backends
from stageline_gateway.groups.routing import choose, identity, why_not_ready
from stageline_gateway.relay.resume import Progress

LOOK_AGAIN_SECONDS: Final = 0.1
"""Circuits and pauses end without telling anybody."""
FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Persistence:
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
    persistence: Persistence
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
        return self.persistence.hold_seconds if self._worth_waiting else 0.0

    @property
    def _resume_window_seconds(self) -> float:
        set_for_all = self.persistence.resume_window_seconds
        return self.backends.served.resume_window_seconds(self.model) if set_for_all is None else set_for_all

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
                return revision_replaced(self._resume_window_seconds, self.persistence.retry_after_seconds)
            reason = self.failure.message if self.failure is not None else ""
            window = f"within {self._resume_window_seconds:g} s"
            return answer_broken(f"{reason} No group of its revision could continue the answer {window}.".lstrip())
        if self.failure is not None:
            return self.failure
        return not_ready(why_not_ready(self.model, groups), self.persistence.retry_after_seconds)

    def _is_replaced(self, groups: Sequence[GroupEndpoint]) -> bool:
        """Whether the model is served by other revisions now, and by none that may continue the answer."""
        staying = {group.revision for group in groups if not group.draining}
        return bool(staying) and self.progress.revision not in staying
