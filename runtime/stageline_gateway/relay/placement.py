"""Where one choice of a request runs: how far it has come, which group is next, when it leaves the one it is on.

A request that was never admitted waits only for a group to become ready, shortly. One that was admitted has been
acknowledged: it waits as long as the resume window lasts, counted from when the last engine that admitted it or sent
it tokens failed it. A group that failed it is asked again after a pause that grows, only when no other can take it, and
only in that time: so time alone bounds how often a group that can't be reached is tried.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import structs

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import HIGHEST_PRIORITY, Admitted, Delta, GenerateRequest, PromptTokens
from stageline_gateway.engine_client.incoming_lines import IncomingLines
from stageline_gateway.engine_client.run_events import EngineEvent, EngineLostError, LossKind
from stageline_gateway.errors import ApiError, answer_broken, model_suspended, not_ready, revision_replaced
from stageline_gateway.groups.backends import SILENT, Backends
from stageline_gateway.groups.probing import NOT_THERE
from stageline_gateway.groups.routing import Wish, choose, identity, why_not_ready
from stageline_gateway.relay.blame import Blame

MOST_ID_CHARACTERS: Final = 128
FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 2.0
SHORTEST_WAIT_SECONDS: Final = 0.002

GONE: Final = "The engine is gone."
STALLED: Final = "The engine is silent, and does not answer its probe."
LEFT: Final = "The engine drains, and another group takes over."


@dataclass(slots=True)
class Progress:
    """How far one choice has come, over all the engines that worked on it, and the request that continues it.

    The next engine treats the relayed token ids as its own output, and its text continues after the relayed characters.
    Seed, limits and prompt are unchanged, so it counts, stops, penalizes and draws its noise as the first engine would
    have.
    """

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    """All that were relayed."""
    characters: int = 0
    """Of text that were relayed."""
    prompt_told: int = 0
    """Tokens of the prompt that were relayed."""
    admissions: int = 0
    """Engines that admitted it."""
    revision: str = ""
    """Of the group that the tokens came from: others may answer differently."""
    weights: str | None = None
    """Digest of what it computed with; empty where it doesn't say, None while it has not been heard."""
    runs: int = 0
    """Engines it was sent to."""
    blame: Blame | None = None
    """For losses of engines that had it, once there is one."""

    @property
    def is_admitted(self) -> bool:
        """Whether any engine has acknowledged it."""
        return self.admissions > 0

    @property
    def has_output(self) -> bool:
        """Whether anything was relayed, so that starting again would repeat it."""
        return bool(self.token_ids) or self.characters > 0 or self.prompt_told > 0

    def may_go_on(self, group: GroupEndpoint, weights: str | None) -> bool:
        """Whether `group`, which said that it computes with `weights`, may continue it: not where it has output and
        the group's revision or weights are others, nor before these were heard."""
        if self.request.adapter is not None and self.request.adapter not in group.adapters:
            return False
        if not self.has_output:
            return True
        return group.revision == self.revision and (not self.weights or weights in ("", self.weights))

    def next_request(self) -> GenerateRequest:
        """What to ask the next engine, under an id of its own: the last engine may still hold the other."""
        self.runs += 1
        if self.runs == 1:
            return self.request
        suffix = f".{self.runs}"
        update: dict[str, Any] = {
            "request_id": self.request.request_id[: MOST_ID_CHARACTERS - len(suffix)] + suffix,
            "priority": max(HIGHEST_PRIORITY, self.request.priority - 1),
        }
        if self.has_output:
            update |= {"generated_token_ids": tuple(self.token_ids), "generated_characters": self.characters}
        if self.prompt_told:
            update |= {"sampling": structs.replace(self.request.sampling, prompt_told=self.prompt_told)}
        return structs.replace(self.request, **update)

    def computed_with(self, revision: str, weights: str | None) -> None:
        """A group of `revision` produced output. That revision has the same weights to the end, even if it is no longer
        known."""
        if weights is not None or revision != self.revision:
            self.revision, self.weights = revision, weights

    def lost(self, error: EngineLostError, most_losses: int) -> str | None:
        """Its engine was lost. Returns why it is sent to no other, as a sentence; None where it may be."""
        self.blame = self.blame or Blame()
        self.blame.lost(error, len(self.token_ids))
        return self.blame.reason(most_losses)

    def take(self, event: EngineEvent, revision: str, weights: str | None = None) -> bool:
        """Account for an event of a group of `revision`; returns whether the client is to see it."""
        if isinstance(event, Delta):
            self.computed_with(revision, weights)
            self.token_ids += event.token_ids
            self.characters += len(event.text)
        elif isinstance(event, Admitted):
            self.admissions += 1
            return self.admissions == 1
        elif isinstance(event, PromptTokens):
            self.computed_with(revision, weights)
            self.prompt_told += len(event.tokens)
        return True


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long, and how often, a request is tried; the values are those of `GatewaySettings`."""

    hold_seconds: float = 30.0
    start_hold_seconds: float = 600.0
    resume_window_seconds: float | None = None
    most_losses: int = 8
    retry_after_seconds: float = 2.0


@dataclass(slots=True)
class Search:
    """Finds the groups that one choice of a request is sent to, one after another."""

    backends: Backends
    model: str
    progress: Progress
    wish: Wish
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
        """The group to send it to, as soon as there is one: one that hasn't failed it yet before one that has.

        Raises ApiError when there is none in time.
        """
        while True:
            able = [group for group in self.backends.candidates(self.model) if self._may_go_on(group)]
            if fresh := [group for group in able if identity(group) not in self._asked_again_at]:
                return self._choose(fresh)
            left_seconds = self._since_seconds + self._window_seconds - self.backends.clock()
            if rested := [group for group in able if left_seconds > 0 and self._is_rested(group)]:
                return self._choose(rested)
            if left_seconds <= 0:
                raise self._why_none()
            await self.backends.changed(min(left_seconds, self._seconds_to_look_again()))

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
        discovered = self.backends.discovered
        if not self._worth_waiting or discovered.is_suspended(self.model):
            return 0.0
        is_starting = discovered.seconds_since_zero(self.model) < self.retry.start_hold_seconds
        return max(self.retry.hold_seconds, self.retry.start_hold_seconds if is_starting else 0.0)

    @property
    def _resume_window_seconds(self) -> float:
        set_for_all = self.retry.resume_window_seconds
        return self.backends.discovered.resume_window_seconds(self.model) if set_for_all is None else set_for_all

    def _seconds_to_look_again(self) -> float:
        """Seconds until time alone may change the result: a pause, a cool-down or a start period ends."""
        now, discovered = self.backends.clock(), self.backends.discovered
        starts_for_seconds = self.retry.start_hold_seconds - discovered.seconds_since_zero(self.model)
        moments = [
            *self._asked_again_at.values(),
            *self.backends.breakers_open_at(self.model),
            now + starts_for_seconds,
        ]
        # Timers may come a moment early.
        return max(min((at - now for at in moments if at > now), default=math.inf), SHORTEST_WAIT_SECONDS)

    def _choose(self, groups: Sequence[GroupEndpoint]) -> GroupEndpoint:
        chosen = choose(groups, self.backends.ledger.loads, self.wish, self.backends.accounts.known)
        assert chosen is not None, "nothing to choose from"
        return chosen

    def _is_rested(self, group: GroupEndpoint) -> bool:
        """Whether a group that has failed it has been left alone since."""
        now = self.backends.clock()
        return self._asked_again_at.get(identity(group), now) <= now

    def _may_go_on(self, group: GroupEndpoint) -> bool:
        return self.progress.may_go_on(group, self.backends.accounts.of(identity(group)).weights)

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
        if self.backends.discovered.is_suspended(self.model):
            return model_suspended(self.model)
        why = why_not_ready(self.model, groups)
        if self.backends.discovered.seconds_since_zero(self.model) == 0:
            why += " Its PipelineModel is scaled to zero (spec.replicas is 0), and nothing has scaled it up in time."
        return not_ready(why, self.retry.retry_after_seconds)

    def _is_replaced(self, groups: Sequence[GroupEndpoint]) -> bool:
        """Whether the model is served by other revisions now, and by none that may continue the answer."""
        staying = {group.revision for group in groups if not group.draining}
        return bool(staying) and self.progress.revision not in staying


@dataclass(eq=False, slots=True)
class Run:
    group: GroupEndpoint
    progress: Progress
    lines: IncomingLines | None = None
    is_leaving: bool = False

    def opened(self, lines: IncomingLines) -> None:
        self.lines = lines


@dataclass(slots=True)
class Runs:
    """The current runs, one for each choice on an engine, and which of them should leave it.

    Reviewed in every period of the probes and at every change of discovery. A run leaves

    - an engine that is gone, by discovery or because another answers at its address, once it has been silent for
      `gone_silence_seconds`: the connection of a machine that vanished never breaks on its own;
    - an engine that is silent to its probe as well, for `silent_probe_seconds`, if another group can continue the run.
      If none can, leaving gains nothing: the machine may only be busy, and continue later;
    - a group that drains, if another accepts the run and has capacity in its queue: at once while it is only queued,
      else when the drain has lasted `drain_patience_seconds`. As many leave as there is capacity for: the others may
      end only where they are.
    """

    backends: Backends
    gone_silence_seconds: float = 1.0
    silent_probe_seconds: float = 2.0
    drain_patience_seconds: float = 10.0
    _runs: set[Run] = field(default_factory=set)

    @contextmanager
    def under_way(self, group: GroupEndpoint, progress: Progress) -> Iterator[Run]:
        run = Run(group, progress)
        self._runs.add(run)
        try:
            yield run
        finally:
            self._runs.discard(run)

    def heard_since(self, key: str, at: float) -> bool:
        """Whether a group, by identity, has sent anything in any run since this time of the loop's clock."""
        answers = (run.lines for run in self._runs if identity(run.group) == key)
        return any(lines is not None and lines.heard_at >= at for lines in answers)

    def review(self) -> None:
        """Interrupt the runs that should leave."""
        known = {identity(group) for group in self.backends.discovered.current.groups}
        for run in tuple(self._runs):
            if run.lines is None or run.is_leaving:
                continue
            if (error := self._why_leave(run, run.lines, known)) is not None:
                run.is_leaving = True
                run.lines.interrupt(error)

    def _why_leave(self, run: Run, lines: IncomingLines, known: Collection[str]) -> EngineLostError | None:
        key = identity(run.group)
        is_gone = key not in known or self.backends.probe_failures.get(key) in NOT_THERE
        if is_gone and lines.silent_seconds >= self.gone_silence_seconds:
            return EngineLostError(LossKind.GONE, GONE)
        others = self._others(run)
        if not others:
            return None
        is_silent = self.backends.probe_failures.get(key) == SILENT
        if is_silent and lines.silent_seconds >= self.silent_probe_seconds:
            return EngineLostError(LossKind.STALLED, STALLED)
        since = self.backends.draining_since.get(key)
        if since is None or not any(map(self.backends.has_room, others)):
            return None
        # With an unread token it would leave for another revision, and could not continue there.
        is_queued = not run.progress.has_output and lines.is_waited_on
        has_lasted = self.backends.clock() - since >= self.drain_patience_seconds
        if is_queued or (run.progress.has_output and has_lasted):
            self.backends.take_room(others)
            return EngineLostError(LossKind.LEFT, LEFT)
        return None

    def _others(self, run: Run) -> list[str]:
        """Groups that could take it over, by identity."""
        others = self.backends.candidates(run.group.model, {identity(run.group)})
        accounts = self.backends.accounts
        keyed = [(identity(other), other) for other in others]
        return [key for key, other in keyed if run.progress.may_go_on(other, accounts.of(key).weights)]
