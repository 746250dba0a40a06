"""The engine's loop: accepts requests, sends plans up to P + 1 ahead of the results, receives tokens.

Event-driven on one asyncio loop: a new request or a finished plan triggers `_pump`, which sends plans until the
run-ahead is full or no request can run. Nothing here blocks; the scheduler selects the rows.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from stageline_api.engine_http import FinishReason, HeldPrefixes, ModelInfo
from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.core_api import AdmittedRequest, AnswerSink
from stageline_runtime.engine.core_life import MAX_WAITING, CoreLife, RequestLoad
from stageline_runtime.engine.group.stage_group import StageGroup, form_scheduler
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.telemetry.metrics import EngineMetrics, Occupancy
from stageline_runtime.engine.telemetry.tracing import TracedRequests
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.engine.warm_up import warm_up
from stageline_runtime.model_facts.model_config import ModelConfig, read_model_config, require_sizes
from stageline_runtime.plan_bus.messages import Drafted, StepDone, StepPlan, ToStage
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.termination import RuntimeFailure

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0


class EngineCore(CoreLife):
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
        """As `CoreLife`."""
        super().__init__(info, metrics, tracing, group=group, incarnation=incarnation)
        self._scheduler: Scheduler | None = None
        self._run_ahead = 1
        self._plans_since: float | None = None
        self._last_plan_seconds = time.monotonic()
        self._warm: asyncio.Event = asyncio.Event()
        self._drafts_warm: asyncio.Event = asyncio.Event()

    # -- life of the engine ------------------------------------------------------------------------------------

    @staticmethod
    def read_model(model_dir: Path) -> ModelConfig:
        """As `CoreLife`."""
        return require_sizes(read_model_config(model_dir))

    @classmethod
    def of(
        cls,
        contract: PodContract,
        info: ModelInfo,
        metrics: EngineMetrics,
        tracing: TracedRequests | None,
        _model_dir: Path,
        _prompts: PromptReader,
    ) -> Self:
        """As `CoreLife`."""
        return cls(info, metrics, tracing, group=contract.group, incarnation=contract.incarnation)

    async def form(self, group: StageGroup) -> None:
        """As `CoreLife`."""
        self.attach(await form_scheduler(group, MAX_WAITING), group.broadcast)

    async def run_first_steps(self, group: StageGroup) -> None:
        """As `CoreLife`."""
        await warm_up(self.warm_up, group.max_step_tokens, group.model, self.speculation)

    def attach(self, scheduler: Scheduler, send: Callable[[ToStage], None]) -> None:
        """The group is complete: plans can be made and sent."""
        self._scheduler = scheduler
        self._send = send
        self._run_ahead = scheduler.ledger.num_cohorts + 1

    async def warm_up(self, num_tokens: int, draft_steps: int = 0) -> None:
        """Send one dummy plan through all stages and wait for its end, and for that of its draft steps."""
        self._warm.clear()
        self._drafts_warm.clear()
        self._dispatch(self._live_scheduler.warm_up(num_tokens, draft_steps))
        await self._warm.wait()
        if draft_steps:
            await self._drafts_warm.wait()

    @property
    def speculation(self) -> Speculation | None:
        """The source of drafts; None without speculative decoding. Known once the group is complete."""
        return self._live_scheduler.speculation

    async def close(self) -> None:
        """As `CoreLife`."""

    def is_running(self, request_id: str) -> bool:
        return self._scheduler is not None and self._scheduler.is_running(request_id)

    def seconds_without_progress(self) -> float:
        return 0.0 if self._plans_since is None else time.monotonic() - self._plans_since

    def beat_if_idle(self) -> None:
        """Send a heartbeat plan when nothing has been sent for a while, nothing is in flight and no request waits."""
        idle_seconds = time.monotonic() - self._last_plan_seconds
        if not self._owes_steps and idle_seconds >= HEARTBEAT_SECONDS:
            self._dispatch(self._live_scheduler.heartbeat())

    def stall(self, limit_seconds: float) -> RuntimeFailure:
        """As `CoreLife`; with no plan in flight the scheduler is the cause."""
        scheduler = self._live_scheduler
        if scheduler.num_plans_in_flight:
            return super().stall(limit_seconds)
        requests = scheduler.num_waiting + scheduler.num_running
        detail = f"a bug in the engine: the scheduler made no plan for {requests} requests within {limit_seconds:g} s"
        return RuntimeFailure(FailureClass.INTERNAL, detail, operation="schedule")

    # -- EngineCoreApi ----------------------------------------------------------------------------------------

    def submit(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        """Queue a request; its events go to `sink`. Raises EngineRefusal when it can't be accepted now."""
        self._check_room(request)
        self._live_scheduler.add(
            Request(
                request_id=request.request_id,
                prompt=request.prompt_token_ids,
                sampling=request.sampling,
                max_new_tokens=request.max_new_tokens,
                stop_token_ids=request.stop_token_ids,
                output=list(request.generated_token_ids),
                prompt_told=max(1, request.prompt_told or 0),
                priority=request.priority,
                cache_salt=request.cache_salt or "",
                prefixes=request.prefixes,
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

    def load(self) -> RequestLoad:
        scheduler = self._scheduler
        if scheduler is None:
            return RequestLoad()
        ledger = scheduler.ledger
        usage = ledger.held_blocks / ledger.num_blocks
        return RequestLoad(scheduler.num_running, scheduler.num_waiting, scheduler.queue_room, ledger.num_slots, usage)

    def held_prefixes(self) -> HeldPrefixes:
        """As `EngineCoreApi`."""
        names = set() if self._scheduler is None else self._scheduler.ledger.named_prefixes()
        return HeldPrefixes(keys=tuple(sorted(names)))

    def metrics_page(self, accept: str = "") -> tuple[bytes, str]:
        """All series and their content type, gauges read at this moment."""
        self._streams.show_waiting()
        if (scheduler := self._scheduler) is None:
            return self._metrics.page(None, accept)
        drafts = None if scheduler.speculation is None else scheduler.speculation.counts
        return self._metrics.page(Occupancy.of(scheduler), accept, drafts)

    # -- plans out, tokens in ----------------------------------------------------------------------------------

    def step_done(self, done: StepDone) -> None:
        """A plan has left the last stage."""
        reported = self._live_scheduler.take_reports(done.reports)
        tokens = self._live_scheduler.complete(done.seq, done.rows)
        self._plans_since = time.monotonic() if self._owes_steps else None
        self._warm.set()
        # Plans first: the stages need not wait while tokens become text.
        self._pump()
        for prompt in reported:
            self._streams.tell_prompt(prompt)
        for token in tokens:
            self._streams.deliver(token)

    def drafted(self, drafted: Drafted) -> None:
        """The last stage has drafted after a plan: rows that waited for it can be planned."""
        self._live_scheduler.take_drafts(drafted)
        self._drafts_warm.set()
        self._pump()

    def _pump(self) -> None:
        scheduler = self._scheduler
        if scheduler is None or self._phase not in (Phase.READY, Phase.DRAINING):
            return
        self._say_outstanding(scheduler.has_requests)
        while scheduler.num_plans_in_flight < self._run_ahead and (plan := scheduler.schedule()) is not None:
            self._observe(plan)
            if self._tracing is not None:
                plan = self._tracing.planned(plan, scheduler.request_at)
            self._dispatch(plan)
        if self._plans_since is None and self._owes_steps:
            self._plans_since = time.monotonic()
        self._check_drained()

    def _dispatch(self, plan: StepPlan) -> None:
        self._last_plan_seconds = time.monotonic()
        if self._plans_since is None:
            self._plans_since = self._last_plan_seconds
        self._send(plan)

    @property
    def _owes_steps(self) -> bool:
        """Whether a plan is in flight, or a request has to be planned."""
        return self._live_scheduler.num_plans_in_flight > 0 or self._live_scheduler.has_requests

    def _observe(self, plan: StepPlan) -> None:
        self._metrics.planned(plan, self._live_scheduler.num_preemptions)
        if plan.fills:
            self._streams.started(self._live_scheduler.first_rows())

    @property
    def _live_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "the group does not stand yet"
        return self._scheduler
