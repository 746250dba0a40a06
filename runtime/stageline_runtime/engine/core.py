"""The engine's loop: requests go in, plans go out up to P + 1 ahead of the results, tokens come back.

Event-driven on one asyncio loop: a new request or a finished plan triggers `_pump`, which sends plans until the
run-ahead is full or nothing can run. Nothing here blocks, and nothing decides rows: that is the scheduler's.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from stageline_api.engine_http import ErrorCode, FinishReason, ModelInfo
from stageline_api.health import EngineStatus, Phase
from stageline_runtime.engine.answer_streams import AnswerStreams
from stageline_runtime.engine.core_api import AdmittedRequest, AnswerSink, EngineRefusal
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.engine.telemetry.tracing import TracedRequests
from stageline_runtime.plan_bus.messages import StepDone, StepPlan, ToStage, WorkOutstanding

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0


class EngineCore:
    """Implements `EngineCoreApi` over a scheduler and a way to send to all stages."""

    def __init__(
        self,
        info: ModelInfo,
        metrics: EngineMetrics,
        tracing: TracedRequests | None = None,
        *,
        group: int | None = None,
        incarnation: int | None = None,
    ) -> None:
        """`group` and `incarnation` are what the engine calls itself to who asks."""
        self._info = info
        self._metrics = metrics
        self._tracing = tracing
        self._streams = AnswerStreams(metrics.requests, self._tracing)
        self._group, self._incarnation = group, incarnation
        self._scheduler: Scheduler | None = None
        self._send: Callable[[ToStage], None] = lambda _message: None
        self._run_ahead = 1
        self._phase = Phase.STARTING
        self._message = ""
        self._pump_wanted = False
        self._outstanding_said = False
        self._plans_since: float | None = None
        self._last_plan_seconds = time.monotonic()
        self._warm: asyncio.Event = asyncio.Event()
        self.drained: asyncio.Event = asyncio.Event()
        """Set when a drain was asked for and no request is left."""
        self.drain_asked: asyncio.Event = asyncio.Event()
        self.drain_asked_by = ""
        """Who asked for the drain first."""
        self.stages_connected: Callable[[], int] = lambda: 0
        self.stages_loaded: Callable[[], int] = lambda: 0

    # -- life of the engine ------------------------------------------------------------------------------------

    def set_phase(self, phase: Phase, message: str = "") -> None:
        """Say where the engine is; only `READY` admits requests."""
        self._phase = phase
        self._message = message

    def attach(self, scheduler: Scheduler, send: Callable[[ToStage], None]) -> None:
        """The group stands: plans can be made and sent."""
        self._scheduler = scheduler
        self._send = send
        self._run_ahead = scheduler.ledger.num_cohorts + 1

    async def warm_up(self, num_tokens: int) -> None:
        """Send one dummy plan through all stages and wait for its end."""
        self._dispatch(self._live_scheduler.warm_up(num_tokens))
        await self._warm.wait()

    def seconds_without_progress(self) -> float:
        return 0.0 if self._plans_since is None else time.monotonic() - self._plans_since

    def beat_if_idle(self) -> None:
        """Send a heartbeat plan when nothing has been sent for a while and nothing is in flight."""
        idle_seconds = time.monotonic() - self._last_plan_seconds
        if self._live_scheduler.num_plans_in_flight == 0 and idle_seconds >= HEARTBEAT_SECONDS:
            self._dispatch(self._live_scheduler.heartbeat())

    def fail_all(self, message: str) -> None:
        """End every stream with a failure; called once, when the group is lost."""
        self.set_phase(Phase.FAILED, message)
        self._streams.fail_all(message)

    # -- EngineCoreApi ----------------------------------------------------------------------------------------

    def submit(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        """Queue a request; its events go to `sink`. Raises EngineRefusal when it can't be taken now."""
        try:
            self._check_room(request.request_id)
        except EngineRefusal as refusal:
            self._metrics.requests.refused(refusal.code)
            raise
        self._live_scheduler.add(
            Request(
                request_id=request.request_id,
                prompt=request.prompt_token_ids,
                sampling=request.sampling,
                max_new_tokens=request.max_new_tokens,
                stop_token_ids=request.stop_token_ids,
                output=list(request.generated_token_ids),
                priority=request.priority,
            )
        )
        self._streams.open(request, sink)
        self._want_pump()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        if self._scheduler is not None:
            self._scheduler.abort(request_id)
        self._streams.abort(request_id, reason)
        self._want_pump()

    def steps_while_queued(self, request_id: str) -> int | None:
        scheduler = self._scheduler
        if scheduler is None or request_id not in self._streams or scheduler.is_running(request_id):
            return None
        return scheduler.num_steps

    def status(self) -> EngineStatus:
        scheduler = self._scheduler
        return EngineStatus(
            phase=self._phase,
            served_name=self._info.served_name,
            group=self._group,
            incarnation=self._incarnation,
            max_model_len=self._info.max_model_len,
            requests_running=scheduler.num_running if scheduler else 0,
            requests_waiting=scheduler.num_waiting if scheduler else 0,
            queue_room=scheduler.queue_room if scheduler else None,
            prompt_tokens_total=self._streams.prompt_tokens_total,
            generation_tokens_total=self._streams.generation_tokens_total,
            stages_connected=self.stages_connected(),
            stages_ready=self.stages_loaded(),
            message=self._message,
        )

    def info(self) -> ModelInfo:
        return self._info

    def start_drain(self, asked_by: str = "POST /v1/drain") -> None:
        """Admit nothing more; `drained` is set when the last stream has ended."""
        self.drain_asked_by = self.drain_asked_by or asked_by
        self.drain_asked.set()
        if self._phase is not Phase.FAILED:
            self.set_phase(Phase.DRAINING)
        self._check_drained()

    def metrics_page(self, accept: str = "") -> tuple[bytes, str]:
        """All series and their content type, gauges read at this moment."""
        self._streams.show_waiting()
        return self._metrics.page(self._scheduler, accept)

    # -- plans out, tokens in ----------------------------------------------------------------------------------

    def step_done(self, done: StepDone) -> None:
        """A plan has left the last stage."""
        tokens = self._live_scheduler.complete(done.seq, done.rows)
        in_flight = self._live_scheduler.num_plans_in_flight
        self._plans_since = time.monotonic() if in_flight else None
        self._warm.set()
        # Plans first: the stages need not wait while tokens become text.
        self._pump()
        for token in tokens:
            self._streams.deliver(token)

    def _want_pump(self) -> None:
        """Pump once at the end of this turn of the loop, so that a burst shares its first plans."""
        if not self._pump_wanted:
            self._pump_wanted = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_wanted = False
        scheduler = self._scheduler
        if scheduler is None or self._phase not in (Phase.READY, Phase.DRAINING):
            return
        self._say_outstanding(scheduler.has_requests)
        while scheduler.num_plans_in_flight < self._run_ahead and (plan := scheduler.schedule()) is not None:
            self._observe(plan)
            if self._tracing is not None:
                plan = self._tracing.planned(plan, scheduler.request_at)
            self._dispatch(plan)
        self._check_drained()

    def _dispatch(self, plan: StepPlan) -> None:
        self._last_plan_seconds = time.monotonic()
        if self._plans_since is None:
            self._plans_since = self._last_plan_seconds
        self._send(plan)

    def _observe(self, plan: StepPlan) -> None:
        self._metrics.planned(plan, self._live_scheduler.num_preemptions)
        if plan.fills:
            self._streams.started(self._live_scheduler.first_rows())

    def _say_outstanding(self, outstanding: bool) -> None:
        if outstanding != self._outstanding_said:
            self._outstanding_said = outstanding
            self._send(WorkOutstanding(outstanding))

    def _check_drained(self) -> None:
        has_requests = self._scheduler is not None and self._scheduler.has_requests
        if self._phase is Phase.DRAINING and not has_requests:
            self.drained.set()

    def _check_room(self, request_id: str) -> None:
        self._refuse_unless_ready()
        if request_id in self._streams:
            raise EngineRefusal(ErrorCode.INVALID_VALUE, f"request_id {request_id!r} is in use", None)
        scheduler = self._live_scheduler
        if not scheduler.can_add:
            raise EngineRefusal(ErrorCode.QUEUE_FULL, f"{scheduler.num_waiting} requests are waiting already", 1.0)

    def _refuse_unless_ready(self) -> None:
        match self._phase:
            case Phase.READY:
                return
            case Phase.DRAINING:
                raise EngineRefusal(ErrorCode.DRAINING, "this group is draining and takes no new requests", 1.0)
            case _:
                raise EngineRefusal(ErrorCode.NOT_READY, f"this group is not ready: {self._phase.value}", 2.0)

    @property
    def _live_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "the group does not stand yet"
        return self._scheduler
