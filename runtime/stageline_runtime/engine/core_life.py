"""The common base of all engine cores: phase, open answers, drain and status.

A core admits requests in one phase only. A drain ends when the last answer has ended; a lost group fails all
answers at once.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from stageline_api.engine_http import ErrorCode, FinishReason, HeldPrefixes, ModelInfo
from stageline_api.failures import FailureClass
from stageline_api.health import EngineStatus, Phase
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.answer_streams import AnswerStreams
from stageline_runtime.engine.core_api import AdmittedRequest, AnswerSink, EngineRefusal
from stageline_runtime.engine.group.stage_group import StageGroup
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.engine.telemetry.tracing import TracedRequests
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.messages import BusProtocolError, Drafted, StepDone, ToStage, WorkOutstanding
from stageline_runtime.termination import RuntimeFailure

MAX_WAITING: Final = 1024
"""Requests that may wait for a slot; further requests are refused and may be retried."""


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """How many requests a core holds; `queue_room` is how many more may wait, None before it is known."""

    running: int = 0
    waiting: int = 0
    queue_room: int | None = None
    slots: int | None = None
    """How many can run at once, None before it is known."""
    kv_usage: float = 0.0
    """Share of the KV cache that running requests hold, 0 to 1."""


class CoreLife(ABC):
    """The part of `EngineCoreApi` that does not depend on what computes."""

    takes_longer_contexts = False
    """Whether the core itself decides how far a model may exceed its config's context."""
    needs_step_plans = True
    """Whether the engine sends its stages each step. Otherwise they never wait for the engine."""
    stages_prepare_guides = True
    """Whether the last stage compiles a grammar beside its steps on request."""
    stalled_words = "no plan finished"
    """Names the missed event in a watchdog's message."""
    adapters: frozenset[str] = frozenset()
    """LoRA adapters that answer here, by name."""

    def __init__(
        self,
        info: ModelInfo,
        metrics: EngineMetrics,
        tracing: TracedRequests | None = None,
        *,
        group: int | None = None,
        incarnation: int | None = None,
    ) -> None:
        """`group` and `incarnation` identify the engine to its clients."""
        self._info = info
        self._metrics = metrics
        self._tracing = tracing
        self._streams = AnswerStreams(metrics.requests, tracing)
        self._group, self._incarnation = group, incarnation
        self._phase = Phase.STARTING
        self._message = ""
        self.drained: asyncio.Event = asyncio.Event()
        """Set when a drain was requested and no request is left."""
        self.drain_asked: asyncio.Event = asyncio.Event()
        self.drain_asked_by = ""
        """The first source that requested the drain."""
        self.stages_connected: Callable[[], int] = lambda: 0
        self.stages_loaded: Callable[[], int] = lambda: 0
        self.weights: Callable[[], str] = lambda: ""
        """Digest of what all stages hold."""
        self._send: Callable[[ToStage], None] = lambda _message: None
        """Sends to all stages, once the group is complete."""
        self.report_bug: Callable[[Exception], None] = _raise
        """Ends the group for an error that would otherwise only appear in the event loop's log."""
        self._pump_wanted = False
        self._outstanding_said = False

    @staticmethod
    @abstractmethod
    def read_model(model_dir: Path) -> ModelConfig:
        """Raises UnsupportedModelError for a model that the stages can't run."""

    @classmethod
    @abstractmethod
    def of(
        cls,
        contract: PodContract,
        info: ModelInfo,
        metrics: EngineMetrics,
        tracing: TracedRequests | None,
        model_dir: Path,
        prompts: PromptReader,
    ) -> Self:
        """The core of a pod's engine."""

    @abstractmethod
    async def form(self, group: StageGroup) -> None:
        """Return once all stages have loaded and the core can send to them."""

    @abstractmethod
    async def run_first_steps(self, group: StageGroup) -> None:
        """Run one step through all stages, or a few."""

    def step_done(self, done: StepDone) -> None:
        """A plan has left the last stage."""
        raise BusProtocolError(f"StepDone of plan {done.seq}, but this engine sends no plans")

    def drafted(self, drafted: Drafted) -> None:
        """The last stage has drafted after a plan."""
        raise BusProtocolError(f"Drafted of plan {drafted.seq}, but this engine sends no plans")

    @abstractmethod
    async def close(self) -> None:
        """Called after the last answer."""

    @abstractmethod
    def load(self) -> RequestLoad:
        """What the core holds now."""

    @abstractmethod
    def is_running(self, request_id: str) -> bool:
        """Whether a request is being computed, and does not wait."""

    @abstractmethod
    def seconds_without_progress(self) -> float:
        """How long requests have been held without a step since; 0 while there are none."""

    def stall(self, limit_seconds: float) -> RuntimeFailure:
        """The failure once `seconds_without_progress` exceeds a limit."""
        detail = f"{self.stalled_words} within {limit_seconds:g} s"
        return RuntimeFailure(FailureClass.STEP_TIMEOUT, detail, operation="wait for the last stage")

    @abstractmethod
    def beat_if_idle(self) -> None:
        """Called about twice a second while the group serves."""

    @abstractmethod
    def submit(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        """As `EngineCoreApi`."""

    @abstractmethod
    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """As `EngineCoreApi`."""

    @abstractmethod
    def steps_while_queued(self, request_id: str) -> int | None:
        """As `EngineCoreApi`."""

    @abstractmethod
    def metrics_page(self, accept: str = "") -> tuple[bytes, str]:
        """As `EngineCoreApi`."""

    @abstractmethod
    def _pump(self) -> None:
        """Submit the work that can be computed now."""

    def _want_pump(self) -> None:
        """Pump once at the end of this turn of the loop, so that requests of a burst are given on together."""
        if not self._pump_wanted:
            self._pump_wanted = True
            asyncio.get_running_loop().call_soon(self._pump_as_wanted)

    def _pump_as_wanted(self) -> None:
        self._pump_wanted = False
        try:
            self._pump()
        except Exception as error:
            self.report_bug(error)

    def _say_outstanding(self, outstanding: bool) -> None:
        """Notify the stages' watchdogs whether a step is expected; sends only changes."""
        if outstanding != self._outstanding_said:
            self._outstanding_said = outstanding
            self._send(WorkOutstanding(outstanding))

    def set_phase(self, phase: Phase, message: str = "") -> None:
        """Set the engine's phase; only `READY` admits requests."""
        self._phase = phase
        self._message = message

    def fail_all(self, message: str, hung: bool = False) -> None:
        """End every stream with a failure; called once, when the group is lost. `hung`: it made no progress before."""
        self.set_phase(Phase.FAILED, message)
        self._streams.fail_all(message, self.is_running, hung)

    def status(self) -> EngineStatus:
        """As `EngineCoreApi`."""
        load = self.load()
        return EngineStatus(
            phase=self._phase,
            served_name=self._info.served_name,
            group=self._group,
            incarnation=self._incarnation,
            max_model_len=self._info.max_model_len,
            requests_running=load.running,
            requests_waiting=load.waiting,
            queue_room=load.queue_room,
            slots=load.slots,
            kv_usage=load.kv_usage,
            longest_wait_seconds=self._streams.longest_wait_seconds(),
            weights=self.weights(),
            prompt_tokens_total=self._streams.prompt_tokens_total,
            generation_tokens_total=self._streams.generation_tokens_total,
            stages_connected=self.stages_connected(),
            stages_ready=self.stages_loaded(),
            message=self._message,
        )

    def info(self) -> ModelInfo:
        """As `EngineCoreApi`."""
        return self._info

    def held_prefixes(self) -> HeldPrefixes:
        """As `EngineCoreApi`."""
        return HeldPrefixes(keys=())

    def start_drain(self, asked_by: str = "POST /v1/drain") -> None:
        """Admit no more requests; `drained` is set when the last stream has ended."""
        self.drain_asked_by = self.drain_asked_by or asked_by
        self.drain_asked.set()
        if self._phase is not Phase.FAILED:
            self.set_phase(Phase.DRAINING)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._phase is not Phase.DRAINING:
            return
        load = self.load()
        if not (load.running or load.waiting):
            self.drained.set()

    def _check_room(self, request: AdmittedRequest) -> None:
        """Raise and count the EngineRefusal if the request can't be accepted now."""
        try:
            self._refuse_unless_ready()
            if request.request_id in self._streams:
                raise EngineRefusal(ErrorCode.INVALID_VALUE, f"request_id {request.request_id!r} is in use", None)
            if request.adapter is not None and request.adapter not in self.adapters:
                # In a rollout, groups of the other revision may have it.
                raise EngineRefusal(ErrorCode.NOT_READY, f"this group has no adapter {request.adapter!r}", 2.0)
            load = self.load()
            if load.queue_room == 0:
                raise EngineRefusal(ErrorCode.QUEUE_FULL, f"{load.waiting} requests are waiting already", 1.0)
        except EngineRefusal as refusal:
            self._metrics.requests.refused(refusal.code)
            raise

    def _refuse_unless_ready(self) -> None:
        match self._phase:
            case Phase.READY:
                return
            case Phase.DRAINING:
                raise EngineRefusal(ErrorCode.DRAINING, "this group is draining and takes no new requests", 1.0)
            case _:
                raise EngineRefusal(ErrorCode.NOT_READY, f"this group is not ready: {self._phase.value}", 2.0)


def _raise(error: Exception) -> None:
    raise error
