"""Runs a request on one group, and moves it to another while nothing of the answer has been relayed.

The caller sees one stream of events whatever happens behind it: one Admitted, then Delta, then Finished. A request
whose engine fails before the first Delta is simply sent to another ready group, each group at most once; after the
first Delta the failure is the caller's to report. Every failure leaves as an `ApiError`.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import Admitted, ChatPrompt, Delta, ErrorCode, GenerateRequest
from stageline_gateway.discovery import EndpointsFile
from stageline_gateway.errors import ApiError, answer_broken, model_not_found, not_ready, refused_by_engine
from stageline_gateway.metrics import GatewayMetrics
from stageline_gateway.routing import Ledger, choose, why_not_ready
from stageline_gateway.upstream import EngineClient, EngineLostError, EngineRefusedError, StreamEvent

logger = logging.getLogger(__name__)

ELSEWHERE: Final = frozenset({ErrorCode.NOT_READY, ErrorCode.DRAINING, ErrorCode.QUEUE_FULL})
"""Refusals that say something about the engine, not about the request: another group may take it."""


@dataclass(frozen=True, slots=True)
class Dispatcher:
    """Sends requests to groups and keeps count of them."""

    endpoints: EndpointsFile
    engine: EngineClient
    ledger: Ledger
    metrics: GatewayMetrics
    retry_after_seconds: float

    def check_model(self, model: str) -> None:
        """Raise ApiError 404 for a model that isn't served, 503 while it isn't known yet what is served."""
        if self.endpoints.groups_of(model):
            return
        if not self.endpoints.ever_read:
            raise not_ready("The gateway has not learned yet which models are served.", self.retry_after_seconds)
        raise model_not_found(model)

    async def events(self, model: str, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        """The events of `request` on some ready group of `model`; raises ApiError."""
        tried: set[str] = set()
        failure: ApiError | None = None
        admitted = answering = False
        while (group := choose(self.endpoints.groups_of(model), self.ledger.shares, tried)) is not None:
            tried.add(group.url)
            try:
                async with aclosing(self._on(group, request)) as events:
                    async for event in events:
                        answering = answering or isinstance(event, Delta)
                        if not (admitted and isinstance(event, Admitted)):
                            yield event
                        admitted = True
                return
            except (EngineLostError, EngineRefusedError) as error:
                failure = self._judge(error, group, request, answering)
        if failure is None:
            raise not_ready(why_not_ready(model, self.endpoints.groups_of(model)), self.retry_after_seconds)
        raise failure

    async def _on(self, group: GroupEndpoint, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        with self.ledger.lease(group.url):
            async with aclosing(self.engine.events(group.url, request)) as events:
                async for event in events:
                    yield event

    def _judge(
        self,
        error: EngineLostError | EngineRefusedError,
        group: GroupEndpoint,
        request: GenerateRequest,
        answering: bool,
    ) -> ApiError:
        """The error to report if no other group takes the request; raises it when none may."""
        if isinstance(error, EngineRefusedError):
            param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
            refusal = refused_by_engine(error.error, param, self.retry_after_seconds)
            if error.error.code in ELSEWHERE:
                return refusal
            raise refusal
        logger.warning(
            "engine lost request=%s model=%s group=%d incarnation=%d kind=%s answering=%s: %s",
            request.request_id, group.model, group.group, group.incarnation, error.kind, answering, error.message,
        )  # fmt: skip
        self.metrics.engine_lost(group.model, error.kind)
        if answering:
            raise answer_broken(error.message)
        return not_ready(f"{error.message} No other group could take the request.", self.retry_after_seconds)
