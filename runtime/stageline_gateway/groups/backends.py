"""Which groups may take a request now: what discovery says, what the last probe found, what requests ran into.

Discovery alone makes a group ready; a failed probe or an open circuit breaker only takes it out again. So a backend
that is gone is left alone within a probe period even if discovery never hears of its end. A version of the groups that
discovery can't read keeps the last good one in force, is logged once, and shows in a metric; it never empties the
gateway.

The circuit breaker of one incarnation of a group is an immutable state and the steps between states. Closed: requests
pass, and failures in a row are counted. Open: none passes for a cool-down. Half-open: after it one request is let
through on trial; if it gets a token the breaker closes, if it fails the breaker opens for twice as long. A trial that
shows neither for `trial_seconds` (a long queue, a client that left) holds the others no longer: the next one is let
through on trial too. So however requests end, an engine in doubt gets one in that time and no more.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from stageline_api.endpoints import DEFAULT_RESUME_WINDOW_SECONDS, Endpoints, GroupEndpoint
from stageline_gateway.engine_client.run_events import EngineLostError, LossKind
from stageline_gateway.groups.routing import EngineAccounts, Ledger, identity

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DiscoveredGroups:
    """The last good version of what discovery found. `problem` is why the newest can't be read, or empty."""

    source: str
    """What discovery reads, for messages: a file, a namespace."""
    on_change: Callable[[Endpoints], None] = lambda _: None
    on_problem: Callable[[bool], None] = lambda _: None
    current: Endpoints = field(default_factory=Endpoints)
    ever_read: bool = False
    problem: str = ""
    first_seen: dict[str, int] = field(default_factory=dict)
    """Served name -> unix time it first appeared, OpenAI's `created` of a model."""
    clock: Callable[[], float] = time.monotonic
    _at_zero: dict[str, float] = field(default_factory=dict)
    """Served name -> when it was last known to be scaled to zero, by `clock`."""
    _found: dict[str, tuple[GroupEndpoint, ...]] = field(default_factory=dict)
    """Name -> its groups, where there are any, in the version `_found_in`: every request asks."""
    _found_in: Endpoints | None = None

    def models(self) -> tuple[str, ...]:
        current = self.current
        adapters = [name for group in current.groups for name in group.adapters]
        adapters += [name for listed in current.adapters.values() for name in listed]
        return tuple(dict.fromkeys([*(group.model for group in current.groups), *current.models, *adapters]))

    @property
    def why_unread(self) -> str:
        return self.problem or f"The {self.source} has not been read yet."

    def fail(self, problem: str) -> None:
        """Keep the version in force, and say why."""
        if problem != self.problem:
            consequence = "the last good version stays in force" if self.ever_read else "nothing is served yet"
            logger.warning("%s; %s", problem, consequence)
        self.problem = problem
        self.on_problem(True)

    def accept(self, endpoints: Endpoints, problem: str = "") -> None:
        """Put a version in force. `problem` names its stale parts."""
        is_news = endpoints != self.current or not self.ever_read
        if (self.problem and not problem) or is_news:
            ready = sum(group.ready for group in endpoints.groups)
            logger.info("%s read: groups=%d ready=%d", self.source, len(endpoints.groups), ready)
        now = self.clock()
        # Both versions: a model that leaves zero with this one was there until now.
        at_zero = dict.fromkeys((*self.current.scaled_to_zero, *endpoints.scaled_to_zero), now)
        self.current, self.ever_read = endpoints, True
        self._at_zero = {name: at for name, at in {**self._at_zero, **at_zero}.items() if name in endpoints.models}
        self.first_seen = {name: self.first_seen.get(name, int(time.time())) for name in self.models()}
        if problem:
            self.fail(problem)
        else:
            self.problem = ""
            self.on_problem(False)
        if is_news:  # else every event of any pod would wake the waiters
            self.on_change(endpoints)

    def is_suspended(self, model: str) -> bool:
        """Whether `model` gets no group until a user resumes it."""
        return self.model_of(model) in self.current.suspended

    def seconds_since_zero(self, model: str) -> float:
        """How long ago `model` was last scaled to zero: 0 while it is, infinity where it never was."""
        model = self.model_of(model)
        if model in self.current.scaled_to_zero:
            return 0.0
        return self.clock() - self._at_zero.get(model, -math.inf)

    def resume_window_seconds(self, model: str) -> float:
        """How long an answer of `model` that has begun waits for a group that continues it."""
        return self.current.resume_window_seconds.get(self.model_of(model), DEFAULT_RESUME_WINDOW_SECONDS)

    def groups_of(self, model: str) -> tuple[GroupEndpoint, ...]:
        """Those of a served name, or that have an adapter of this name."""
        if self._found_in is not self.current:
            self._found, self._found_in = {}, self.current
        if (known := self._found.get(model)) is not None:
            return known
        if groups := self._find_groups_of(model):
            self._found[model] = groups
        return groups

    def _find_groups_of(self, model: str) -> tuple[GroupEndpoint, ...]:
        if self.adapter_of(model) is not None:
            return tuple(group for group in self.current.groups if model in group.adapters)
        return tuple(group for group in self.current.groups if group.model == model)

    def adapter_of(self, model: str) -> str | None:
        """The adapter that is asked for by this name; None where a model is served under it, or nothing."""
        return None if self.model_of(model) == model else model

    def model_of(self, name: str) -> str:
        """Served model with groups that answer for `name`: itself, unless it is an adapter's name and no model's."""
        current = self.current
        if name in current.models or any(group.model == name for group in current.groups):
            return name
        of_groups = (group.model for group in current.groups if name in group.adapters)
        return next(of_groups, None) or next((each for each, has in current.adapters.items() if name in has), name)


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a breaker opens, and for how long."""

    failures_to_open: int = 3
    """Failures in a row. An engine that can't be reached at all opens it at once."""
    cool_down_seconds: float = 1.0
    longest_cool_down_seconds: float = 30.0
    trial_seconds: float = 2.0
    """How long a trial keeps other requests away."""


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """What requests have shown of a group's engine. Times are seconds on one monotonic clock."""

    failures: int = 0
    """In a row."""
    openings: int = 0
    """In a row; 0 means closed."""
    shut_until_seconds: float = 0.0
    """No request passes before this: the end of the cool-down, or of the last trial's time."""
    cooled_at_seconds: float = 0.0
    """The end of the cool-down."""

    @property
    def is_closed(self) -> bool:
        return self.openings == 0

    def admits(self, now_seconds: float) -> bool:
        return self.is_closed or now_seconds >= self.shut_until_seconds

    def started(self, now_seconds: float, policy: BreakerPolicy) -> "CircuitBreaker":
        return self if self.is_closed else replace(self, shut_until_seconds=now_seconds + policy.trial_seconds)

    def answered(self) -> "CircuitBreaker":
        return CLOSED

    def failed(self, now_seconds: float, policy: BreakerPolicy, at_once: bool = False) -> "CircuitBreaker":
        """A request failed; `at_once` when no other would have gone better."""
        failures = self.failures + 1
        if self.is_closed and not at_once and failures < policy.failures_to_open:
            return replace(self, failures=failures)
        if now_seconds < self.cooled_at_seconds:
            return replace(self, failures=failures)  # one of several that were under way when it opened
        cool_down_seconds = min(
            policy.cool_down_seconds * 2.0 ** min(self.openings, 30), policy.longest_cool_down_seconds
        )
        cooled_at_seconds = now_seconds + cool_down_seconds
        return CircuitBreaker(failures, self.openings + 1, cooled_at_seconds, cooled_at_seconds)


CLOSED: Final = CircuitBreaker()


SILENT: Final = "its engine does not answer its probe"
"""Different from an unreachable engine: there is no sign that it is gone. Its machine may have vanished, or be busy."""


@dataclass(slots=True)
class Backends:
    """All that is known of the groups; everything but `discovered` is keyed by `identity`."""

    discovered: DiscoveredGroups
    ledger: Ledger = field(default_factory=Ledger)
    policy: BreakerPolicy = field(default_factory=BreakerPolicy)
    clock: Callable[[], float] = time.monotonic
    breakers: dict[str, CircuitBreaker] = field(default_factory=dict)
    probe_failures: dict[str, str] = field(default_factory=dict)
    """Why the last probe of a group failed, one sentence."""
    draining_since: dict[str, float] = field(default_factory=dict)
    """When a group was first known to drain, from discovery or from its engine."""
    said_to_drain: set[str] = field(default_factory=set)
    """Groups with engines that reported this themselves: they never revert it."""
    queue_rooms: dict[str, int] = field(default_factory=dict)
    """How many more requests may wait in a group's queue, by its last probe and the requests moved there since because
    another group drains. A group is missing if its engine doesn't report this."""
    accounts: EngineAccounts = field(default_factory=EngineAccounts)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def groups_of(self, model: str) -> tuple[GroupEndpoint, ...]:
        """All groups of `model`; ready are those that may take a request, the others say why not."""
        return tuple(self._judged(group) for group in self.discovered.groups_of(model))

    def candidates(self, model: str, excluded: Collection[str] = ()) -> list[GroupEndpoint]:
        """Groups that may accept a request of `model` now, except the excluded identities."""
        return [group for group in self.groups_of(model) if group.ready and identity(group) not in excluded]

    def take(self, endpoints: Endpoints) -> None:
        """Discovery has a new version: forget what isn't in it."""
        known = {identity(group): group for group in endpoints.groups}
        self.ledger.keep(known.keys())
        self.accounts.keep(known.keys())
        self.breakers = {key: breaker for key, breaker in self.breakers.items() if key in known}
        self.probe_failures = {key: why for key, why in self.probe_failures.items() if key in known}
        self.queue_rooms = {key: room for key, room in self.queue_rooms.items() if key in known}
        now = self.clock()
        self.said_to_drain &= known.keys()
        draining = {key for key, group in known.items() if group.draining or key in self.said_to_drain}
        self.draining_since = {key: self.draining_since.get(key, now) for key in draining}
        self.notify()

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
        self.notify()
        return True

    def has_room(self, key: str) -> bool:
        """Whether one more request may wait at a group, for all that is known."""
        return self.queue_rooms.get(key, 1) > 0

    def take_room(self, keys: Sequence[str]) -> None:
        """Count a request as waiting at that one of some groups which has the most room, until its next probe."""
        known = [key for key in keys if key in self.queue_rooms]
        if known and len(known) == len(keys):
            self.queue_rooms[max(known, key=self.queue_rooms.__getitem__)] -= 1

    def refused_as_full(self, key: str) -> None:
        """Count a group's queue as full until its next probe: its engine refused a request so."""
        if key in self.queue_rooms:
            self.queue_rooms[key] = 0

    def breaker_of(self, key: str) -> CircuitBreaker:
        return self.breakers.get(key, CLOSED)

    def set_breaker(self, key: str, breaker: CircuitBreaker) -> None:
        if breaker is CLOSED:
            if self.breakers.pop(key, CLOSED).openings:
                self.notify()
        else:
            self.breakers[key] = breaker

    @contextmanager
    def trial(self, key: str) -> Iterator[None]:
        """Account for a request's run on a group in its breaker, while the context lasts."""
        self.set_breaker(key, self.breaker_of(key).started(self.clock(), self.policy))
        try:
            yield
        except EngineLostError as error:
            # One connection's end is one failure, however many requests it was the end of.
            if error.kind is not LossKind.LEFT and not error.is_echo:
                at_once = error.kind is LossKind.UNREACHABLE
                self.set_breaker(key, self.breaker_of(key).failed(self.clock(), self.policy, at_once))
            raise

    def answered(self, key: str) -> None:
        if key in self.breakers:
            self.set_breaker(key, self.breaker_of(key).answered())

    def breakers_open_at(self, model: str) -> list[float]:
        """When each group of `model` with a breaker that isn't closed may be tried again, by `clock`."""
        breakers = (self.breaker_of(identity(group)) for group in self.discovered.groups_of(model))
        return [breaker.shut_until_seconds for breaker in breakers if not breaker.is_closed]

    def open_breakers(self, model: str) -> int:
        """How many groups of `model` have a breaker that isn't closed."""
        return sum(not self.breaker_of(identity(group)).is_closed for group in self.discovered.groups_of(model))

    def notify(self) -> None:
        """Wake the waiters of `changed`."""
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, timeout_seconds: float) -> None:
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
        if not reason and not self.breaker_of(key).admits(self.clock()):
            reason = "its engine failed several requests, and rests"
        return group.model_copy(update={"ready": False, "message": reason}) if reason else group
