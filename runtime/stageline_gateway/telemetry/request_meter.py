"""Times one request from its arrival at the gateway, by the events that its engines send."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from stageline_api.engine_http import Admitted, Delta, Finished
from stageline_gateway.engine_client.generation import StreamEvent
from stageline_gateway.telemetry.metrics import GatewayMetrics


@dataclass(slots=True)
class RequestMeter:
    """Times one request from its arrival; `see` is told every event as it is received from the engine."""

    metrics: GatewayMetrics
    model: str
    clock: Callable[[], float] = time.monotonic
    arrived: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0
    """Of the first choice, whose tokens are timed."""
    all_tokens: int = 0
    """Of all choices."""
    choices: int = 1
    """Choices not finished yet."""
    trace_id: str = ""
    """Of the request's span, for whoever looks at a slow one; empty where none is kept."""
    _admitted: bool = False

    def see(self, event: StreamEvent, choice: int = 0) -> None:
        """Account for one event. Of several choices the first one's tokens are timed, and all are counted."""
        if isinstance(event, Delta):
            self.all_tokens += len(event.token_ids)
        match event:
            case Admitted(prompt_tokens=prompt_tokens):
                self.metrics.prompt_tokens.labels(self.model).inc(prompt_tokens)
                self._taken()
            case Delta(token_ids=token_ids) if choice:
                self.metrics.generation_tokens.labels(self.model).inc(len(token_ids))
            case Delta(token_ids=token_ids) if token_ids:
                self._new_tokens(len(token_ids), self.clock())
            case Finished():
                self.choices -= 1
                if not self.choices:
                    self._finished(self.clock())
            case _:
                pass

    def _taken(self) -> None:
        """An engine has a run of it; the first one ends its wait for a group."""
        if not self._admitted:
            self._admitted = True
            self.metrics.queue_time.labels(self.model).observe(self.clock() - self.arrived)

    def _new_tokens(self, count: int, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
            self.metrics.time_to_first_token.labels(self.model).observe(now - self.arrived, self._exemplar())
        else:
            self.metrics.inter_token_latency.labels(self.model).observe(now - self.last_token)
        self.last_token = now
        self.tokens += count
        self.metrics.generation_tokens.labels(self.model).inc(count)

    def _finished(self, now: float) -> None:
        self.metrics.e2e_request_latency.labels(self.model).observe(now - self.arrived, self._exemplar())
        if self.first_token is not None and self.tokens > 1:
            per_token_seconds = (self.last_token - self.first_token) / (self.tokens - 1)
            self.metrics.time_per_output_token.labels(self.model).observe(per_token_seconds)

    def _exemplar(self) -> dict[str, str] | None:
        return {"trace_id": self.trace_id} if self.trace_id else None
