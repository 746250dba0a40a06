"""Runs the choices of a request on groups and delivers their events, in the call that read them, with no queue between.

`deliver` gets all events of one read. A slow client makes the engine wait: the awaitable from `deliver` is awaited
before the next read. For one choice it gets one Admitted, then Delta, then Finished, and a Resumed if another engine
continued. A request that was only queued is sent to any other group. A request with output is continued by a group of
the same revision, since another revision may hold other weights. It may be the same group, if it is back in time. Until
then the request waits. A request that can't continue raises an `ApiError`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec import structs

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import Admitted, ChatPrompt, Delta, ErrorCode, GenerateRequest, Prompt
from stageline_gateway.engine_client.generation import EngineClient
from stageline_gateway.engine_client.incoming_lines import Pause
from stageline_gateway.engine_client.run_events import (
    AnswerFailedError,
    EngineEvent,
    EngineLostError,
    EngineRefusedError,
    Resumed,
    StreamEvent,
)
from stageline_gateway.engine_trust import EngineAddress
from stageline_gateway.errors import (
    ApiError,
    answer_broken,
    answer_failed,
    not_ready,
    refused_by_engine,
)
from stageline_gateway.groups.backends import Backends
from stageline_gateway.groups.routing import NO_WISH, Lease, Wish, expected_tokens, identity
from stageline_gateway.relay.placement import Progress, RetryPolicy, Runs, Search
from stageline_gateway.telemetry.metrics import ModelMetrics
from stageline_gateway.telemetry.tracing import RequestSpan

logger = logging.getLogger(__name__)

ELSEWHERE: Final = frozenset({ErrorCode.NOT_READY, ErrorCode.DRAINING, ErrorCode.QUEUE_FULL})
"""Refusals that say something about the engine, not about the request: another group may take it."""

LONG_TOKENS: Final = 8192
"""A prompt of more takes a millisecond to name and send."""

Deliver = Callable[[int, Sequence[StreamEvent]], Pause | None]
"""Takes the number of a choice and its next events, at once and never none."""
DeliverOne = Callable[[Sequence[StreamEvent]], Pause | None]


class GenerateJob(NamedTuple):
    """What to generate, and its context."""

    model: str
    request: GenerateRequest
    session: str = ""
    """What the client named its session, if it did."""
    span: RequestSpan = RequestSpan()
    prompts: tuple[Prompt, ...] = ()
    """All prompts, where there are several: the request has the first."""
    to_client_error: Callable[[ApiError], ApiError] = lambda error: error
    """An engine's refusal with the client's own names of fields."""

    def choice(self, number: int, each: int) -> "GenerateJob":
        """The same for one of several choices, `each` for a prompt: they differ in id, prompt, and the choice that keys
        their noise.
        """
        own: dict[str, Any] = {"choice": number % each}
        if number and isinstance(self.request.prompt, ChatPrompt):
            # A chat's answer has its prompt's once.
            own |= {"prompt_logprobs": None, "prompt_told": None}
        sampling = structs.replace(self.request.sampling, **own)
        update: dict[str, Any] = {"request_id": f"{self.request.request_id}-{number}", "sampling": sampling}
        if self.prompts:
            update |= {"prompt": self.prompts[number // each]}
        return self._replace(request=structs.replace(self.request, **update))

    def choices_of_each(self, count: int) -> int:
        """Of `count` choices, how many are of one prompt."""
        return count // max(1, len(self.prompts))


class _ChoicesInTurn:
    """Lets several choices deliver through one `deliver`, which is never called while a delivery is awaited.

    The first Admitted is delivered when all choices have been admitted, and represents all, with the tokens of all
    prompts: so a rejection of any choice rejects the request. A choice that waits to deliver holds the events of one
    read; the rest waits in its connection to the engine. Nothing is delivered after a failure.
    """

    def __init__(self, count: int, each: int, deliver: Deliver) -> None:
        self._deliver = deliver
        self._unadmitted = count
        self._each = each
        self._prompt_tokens = 0
        self._first: tuple[int, Admitted] | None = None
        self._all_admitted = asyncio.Event()
        self._free = asyncio.Event()
        """Not set while something that `deliver` asked for is awaited."""
        self._free.set()
        self._has_failed = False

    def deliver(self, choice: int, events: Sequence[StreamEvent]) -> Pause | None:
        if isinstance(first := events[0], Admitted):
            self._admit(choice, first)
            return partial(self._later, choice, events[1:])
        if self._has_failed or not self._free.is_set():
            return partial(self._later, choice, events)
        return self._pass_on(choice, events)

    def fail(self) -> None:
        """Deliver nothing after the events delivered so far."""
        self._has_failed = True

    def _admit(self, choice: int, admitted: Admitted) -> None:
        self._first = self._first or (choice, admitted)
        self._unadmitted -= 1
        self._prompt_tokens += 0 if choice % self._each else admitted.prompt_tokens
        if not self._unadmitted:
            self._all_admitted.set()

    def _pass_on(self, choice: int, events: Sequence[StreamEvent]) -> Pause | None:
        try:
            pause = self._deliver(choice, events) if events else None
        except BaseException:
            self._has_failed = True
            raise
        if pause is None:
            return None
        self._free.clear()
        return partial(self._hold_all, pause)

    async def _hold_all(self, pause: Pause) -> None:
        try:
            await pause()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._free.set()

    async def _later(self, choice: int, events: Sequence[StreamEvent]) -> None:
        """Deliver `events` when all choices are admitted, that was delivered, and no other delivery is awaited."""
        await self._all_admitted.wait()
        while not self._free.is_set():
            await self._free.wait()
        if self._has_failed:
            await asyncio.Event().wait()  # until the failure has ended this choice too
        if self._first is not None:
            (number, admitted), self._first = self._first, None
            await self._later(number, [structs.replace(admitted, prompt_tokens=self._prompt_tokens)])
            await self._later(choice, events)
        elif (pause := self._pass_on(choice, events)) is not None:
            await pause()


class _Relayed(NamedTuple):
    """One choice on one group, and the effect of its events on the accounting."""

    group: GroupEndpoint
    key: str
    progress: Progress
    lease: Lease
    backends: Backends
    metrics: ModelMetrics
    deliver: DeliverOne

    @property
    def weights(self) -> str | None:
        """What its engine computes with, as far as it has been heard."""
        return self.backends.accounts.of(self.key).weights

    def take(self, events: Sequence[EngineEvent]) -> Pause | None:
        """Account for events of one run, and deliver those that the client is to see."""
        progress, seen, weights = self.progress, list[StreamEvent](), self.weights
        for event in events:
            if isinstance(event, Delta):
                self.backends.answered(self.key)
                self.lease.spend(len(event.token_ids))
            elif isinstance(event, Admitted) and progress.runs > 1:
                outcome = "resumed" if progress.has_output else "moved"
                self.metrics.resumes.labels(self.group.model, outcome).inc()
                if progress.has_output:
                    seen.append(Resumed())
            if progress.take(event, self.group.revision, weights):
                seen.append(event)
        return self.deliver(seen) if seen else None


@dataclass(frozen=True, slots=True)
class Dispatcher:
    backends: Backends
    engine: EngineClient
    runs: Runs
    metrics: ModelMetrics
    retry: RetryPolicy

    async def run_choices(self, job: GenerateJob, count: int, deliver: Deliver) -> None:
        """Deliver the events of `count` choices of `job`; raises the ApiError of the first that fails, ending all."""
        if count == 1:
            await self.run(job, partial(deliver, 0))
            return
        each = job.choices_of_each(count)
        turns = _ChoicesInTurn(count, each, deliver)
        jobs = [job.choice(number, each) for number in range(count)]
        is_long = expected_tokens(job.request) > LONG_TOKENS
        tasks: list[asyncio.Task[None]] = []
        try:
            for number, one in enumerate(jobs):
                tasks.append(asyncio.create_task(self._run_choice(one, number, turns)))
                if is_long:  # each names its prompt and sends it: others have their turn between two of them
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, ApiError):  # of which one at most is heard of
                    ended.bare()

    async def _run_choice(self, job: GenerateJob, number: int, turns: _ChoicesInTurn) -> None:
        try:
            await self.run(job, partial(turns.deliver, number))
        except ApiError:
            turns.fail()
            raise

    async def run(self, job: GenerateJob, deliver: DeliverOne) -> None:
        """Deliver the events of one choice, from ready groups of its model, to the end; raises ApiError."""
        progress = Progress(job.request)
        # A model with one group has nothing to choose.
        is_alone = len(self.backends.discovered.groups_of(job.model)) < 2
        wish = NO_WISH if is_alone else Wish.of(job.request, job.session)
        search = Search(self.backends, job.model, progress, wish, self.retry)
        while True:
            try:
                group = await search.next_group()
            except ApiError:
                self._gave_up(progress, job.model, "expired")
                raise
            try:
                await self._run_on(group, progress, job.span, deliver, wish)
                return
            except EngineRefusedError as error:
                failure = self._judge_refusal(error, job, progress)
                is_full = error.error.code is ErrorCode.QUEUE_FULL
                if is_full:
                    self.backends.refused_as_full(identity(group))
                search.failed(group, failure, not is_full)
            except EngineLostError as error:
                search.failed(group, self._judge_loss(error, group, progress), True)
            except AnswerFailedError as error:
                raise answer_failed(error.message) from None

    async def _run_on(
        self,
        group: GroupEndpoint,
        progress: Progress,
        span: RequestSpan,
        deliver: DeliverOne,
        wish: Wish,
    ) -> None:
        """One run on one group: deliver what the client hasn't seen of it."""
        key = identity(group)
        request = progress.next_request()
        if wish.prefixes:
            request = structs.replace(request, prefixes=wish.prefixes)
            self.backends.accounts.note_sent(key, wish.prefixes, self.backends.clock())
        with (
            self.backends.ledger.lease(key, expected_tokens(request)) as lease,
            self.runs.under_way(group, progress) as run,
            self.backends.trial(key),
            span.run(group, progress.runs, request) as traced,
        ):
            relayed = _Relayed(group, key, progress, lease, self.backends, self.metrics, deliver)
            await self.engine.generate(
                EngineAddress(group.url, group.tls_name),
                traced,
                relayed.take,
                run.opened,
            )

    def _judge_refusal(self, error: EngineRefusedError, job: GenerateJob, progress: Progress) -> ApiError:
        """The error to report if no other group takes the request; raises it when none may."""
        param = "messages" if isinstance(job.request.prompt, ChatPrompt) else "prompt"
        refusal = job.to_client_error(refused_by_engine(error.error, param, self.retry.retry_after_seconds))
        if error.error.code in ELSEWHERE:
            return refusal
        if not progress.is_admitted:
            raise refusal
        self._gave_up(progress, job.model, "refused")
        raise answer_broken(f"Another engine would not continue the answer: {refusal.message}")

    def _judge_loss(self, error: EngineLostError, group: GroupEndpoint, progress: Progress) -> ApiError:
        """The error to report if no other group takes the request; raises it when it has lost too many."""
        logger.warning(
            "engine lost served=%s of %s kind=%s tokens=%d: %s",
            group.model, self.backends.discovered.source, error.kind, len(progress.token_ids), error.message,
            extra={
                "group": group.group,
                "incarnation": group.incarnation,
                "request_id": progress.request.request_id,
                "client_request_id": progress.request.client_request_id,
            },
        )  # fmt: skip
        self.metrics.engine_losses.labels(group.model, error.kind).inc()
        blamed = progress.lost(error, self.retry.most_losses)
        if blamed is not None:
            self._gave_up(progress, group.model, "exhausted")
            raise self._failure(progress, f"{error.message} {blamed}")
        if progress.has_output:
            return answer_broken(error.message)
        return self._failure(progress, f"{error.message} No other group could take the request.")

    def _failure(self, progress: Progress, message: str) -> ApiError:
        if progress.has_output:
            return answer_broken(message)
        return not_ready(message, self.retry.retry_after_seconds)

    def _gave_up(self, progress: Progress, model: str, outcome: str) -> None:
        """Count an acknowledged request that is lost."""
        if progress.is_admitted:
            self.metrics.resumes.labels(model, outcome).inc()
