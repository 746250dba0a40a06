"""Runs one choice of a request on a group, and on another when that one fails it, as one stream of events.

The caller sees one Admitted, then Delta, then Finished, and a Resumed where another engine went on. What was only
queued is sent to any other group. What has begun is continued by a group of the same revision, since another revision
may hold other weights; on the same group too, when it is back in time. Until then the request waits. What can't go on
leaves as an `ApiError`.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import Admitted, ChatPrompt, Delta, ErrorCode, GenerateRequest
from stageline_gateway.engine_client.generation import (
    AnswerFailedError,
    EngineClient,
    EngineLostError,
    EngineRefusedError,
    LossKind,
)
from stageline_gateway.engine_client.stream_events import Resumed, StreamEvent
from stageline_gateway.errors import (
    ApiError,
    answer_broken,
    answer_failed,
    model_not_found,
    not_ready,
    refused_by_engine,
)
from stageline_gateway.groups.affinity import affinity_key
from stageline_gateway.groups.backends import Backends
from stageline_gateway.groups.routing import expected_tokens, identity
from stageline_gateway.relay.placement import Persistence, Search
from stageline_gateway.relay.resume import Progress
from stageline_gateway.relay.runs import Runs
from stageline_gateway.telemetry.metrics import GatewayMetrics
from stageline_gateway.telemetry.tracing import PassedOn, RequestSpan

logger = logging.getLogger(__name__)

ELSEWHERE: Final = frozenset({ErrorCode.NOT_READY, ErrorCode.DRAINING, ErrorCode.QUEUE_FULL})
"""Refusals that say something about the engine, not about the request: another group may take it."""

BLAMELESS: Final = frozenset({LossKind.LEFT, LossKind.UNREACHABLE})
"""Losses that can't be the request's doing: it was moved on purpose, or nothing of it was ever sent."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One choice to generate, and what goes with it."""

    model: str
    request: GenerateRequest
    session: str = ""
    """What the client named its session, if it did."""
    span: RequestSpan = field(default_factory=PassedOn)


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Sends requests to groups and keeps count of them."""

    backends: Backends
    engine: EngineClient
    runs: Runs
    metrics: GatewayMetrics
    persistence: Persistence

    def check_model(self, model: str) -> None:
        """Raise ApiError 404 for a model that isn't served, 503 while it isn't known yet what is served."""
        served = self.backends.served
        if model in served.first_seen:
            return
        if not served.ever_read:
            message = "The gateway has not learned yet which models are served."
            raise not_ready(message, self.persistence.retry_after_seconds)
        raise model_not_found(model)

    async def events(self, ask: Ask) -> AsyncGenerator[StreamEvent, None]:
        """The events of `ask` on ready groups of its model; raises ApiError."""
        progress = Progress(ask.request)
        affinity = affinity_key(ask.request.prompt, ask.session)
        search = Search(self.backends, ask.model, progress, affinity, self.persistence)
        while True:
            group = await self._next_group(search)
            try:
                async with aclosing(self._on(group, progress, ask.span)) as events:
                    async for event in events:
                        yield event
                return
            except EngineRefusedError as error:
                failure = self._judge_refusal(error, ask, progress)
                is_full = error.error.code is ErrorCode.QUEUE_FULL
                if is_full:
                    self.backends.refused_as_full(identity(group))
                search.failed(group, failure, not is_full)
            except EngineLostError as error:
                search.failed(group, self._judge_loss(error, group, progress), True)
            except AnswerFailedError as error:
                raise answer_failed(error.message) from None

    async def _next_group(self, search: Search) -> GroupEndpoint:
        try:
            return await search.next_group()
        except ApiError:
            self._gave_up(search.progress, search.model, "expired")
            raise

    async def _on(
        self, group: GroupEndpoint, progress: Progress, span: RequestSpan
    ) -> AsyncGenerator[StreamEvent, None]:
        """One run on one group: what the client hasn't seen of it."""
        key = identity(group)
        request = progress.next_request()
        with (
            self.backends.ledger.lease(key, expected_tokens(request)) as lease,
            self.runs.under_way(group, progress) as run,
            self.backends.trial(key),
            span.run(group, progress.runs, request) as traced,
        ):
            async with aclosing(self.engine.events(group.url, traced, run.opened)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        self.backends.answered(key)
                        lease.spend(len(event.token_ids))
                    elif isinstance(event, Admitted) and progress.runs > 1:
                        self.metrics.resumed(group.model, "resumed" if progress.has_output else "moved")
                        if progress.has_output:
                            yield Resumed()
                    if progress.take(event, group.revision):
                        yield event

    def _judge_refusal(self, error: EngineRefusedError, ask: Ask, progress: Progress) -> ApiError:
        """The error to report if no other group takes the request; raises it when none may."""
        param = "messages" if isinstance(ask.request.prompt, ChatPrompt) else "prompt"
        refusal = refused_by_engine(error.error, param, self.persistence.retry_after_seconds)
        if error.error.code in ELSEWHERE:
            return refusal
        if not progress.is_admitted:
            raise refusal
        self._gave_up(progress, ask.model, "refused")
        raise answer_broken(f"Another engine would not continue the answer: {refusal.message}")

    def _judge_loss(self, error: EngineLostError, group: GroupEndpoint, progress: Progress) -> ApiError:
        """The error to report if no other group takes the request; raises it when it has lost too many."""
        logger.warning(
            "engine lost request=%s model=%s group=%d incarnation=%d kind=%s tokens=%d: %s",
            progress.request.request_id, group.model, group.group, group.incarnation, error.kind,
            len(progress.token_ids), error.message,
        )  # fmt: skip
        self.metrics.engine_lost(group.model, error.kind)
        message = f"{error.message} No other group could take the request."
        if progress.has_output:
            failure = answer_broken(error.message)
        else:
            failure = not_ready(message, self.persistence.retry_after_seconds)
        if error.kind not in BLAMELESS:
            progress.losses += 1
        if progress.losses > self.persistence.most_losses:
            self._gave_up(progress, group.model, "exhausted")
            raise failure
        return failure

    def _gave_up(self, progress: Progress, model: str, outcome: str) -> None:
        """Count an acknowledged request that is lost."""
        if progress.is_admitted:
            self.metrics.resumed(model, outcome)
