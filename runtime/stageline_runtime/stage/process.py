"""The life of a stage: connect to the engine, load its layers, meet its peers, run plans, end with a reason."""

import logging
import os
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from stageline_api import ports
from stageline_api.failures import ExitCode, FailureClass
from stageline_api.health import Phase
from stageline_api.runtime_config import LayerRange
from stageline_runtime.bus import BusClosedError, BusProtocolError, StageBus
from stageline_runtime.contract import PodContract
from stageline_runtime.graphs.capture import capture
from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.messages import (
    PROTOCOL_VERSION,
    DrainRequested,
    GroupFailed,
    Hello,
    Loaded,
    Ping,
    Pong,
    Refused,
    Shutdown,
    StepDone,
    StepPlan,
    ToStage,
    Welcome,
    WorkOutstanding,
)
from stageline_runtime.model_config import ModelConfig, UnsupportedModelError, read_model_config
from stageline_runtime.models.families import build_any_stage_model
from stageline_runtime.models.protocol import ModelBuilder, StageModel
from stageline_runtime.stage.clock import IDLE, StateClock, WaitReason
from stageline_runtime.stage.failures import allocation_failure, as_failure, group_failure
from stageline_runtime.stage.health import HealthServer, health_url
from stageline_runtime.stage.memory import available_bytes, host_identity
from stageline_runtime.stage.metrics import StageMetrics
from stageline_runtime.stage.progress import StageProgress
from stageline_runtime.stage.runner import StageRunner, step_kind
from stageline_runtime.stage.timeline import Timeline
from stageline_runtime.stage.watchdog import Watchdog
from stageline_runtime.termination import RuntimeFailure, write_last_words
from stageline_runtime.transport.loopback import LoopbackTransport
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, Transport

logger = logging.getLogger(__name__)

HANDSHAKE_POLL_SECONDS = 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StageProcess:
    """One stage from start to end; `run` returns the exit code."""

    def __init__(self, contract: PodContract, build_model: ModelBuilder = build_any_stage_model) -> None:
        self._contract = contract
        self._build_model = build_model
        self._timeline = Timeline()
        self._clock = StateClock(listener=self._timeline.mark)
        self._progress = StageProgress(
            stage=contract.stage,
            stage_count=contract.stage_count,
            incarnation=contract.incarnation,
            clock=self._clock,
            timeline=self._timeline,
        )
        self._bus: StageBus | None = None
        self._watchdog = Watchdog(contract.config.timeouts.step_seconds, self._engine_hung_up, self._end_now)
        self._plans: deque[StepPlan] = deque()
        self._outstanding = False
        self._drain_asked = False
        self._shutdown = False

    def run(self) -> ExitCode:
        """Live until the engine says to shut down (0) or something fails (the code of its class)."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            with self._health():
                self._live()
        except Exception as error:
            if self._drain_asked and isinstance(error, BusClosedError):
                return ExitCode.DRAINED
            failure = as_failure(error)
            if failure is not error and failure.failure_class is FailureClass.INTERNAL:
                logger.exception("the stage failed unexpectedly")  # a bug: the log gets its traceback
            return self._end(failure)
        logger.info("stage %d drained", self._contract.stage)
        return ExitCode.DRAINED

    @contextmanager
    def _health(self) -> Iterator[None]:
        host = self._contract.pod_ip
        metrics = StageMetrics(self._progress, self._contract.config.served_name)
        try:
            health = HealthServer(host, ports.STAGE_HEALTH, self._progress, metrics)
        except OSError as error:
            detail = f"can't listen on {host}:{ports.STAGE_HEALTH}: {error.strerror}"
            raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error
        health.start()
        try:
            yield
        finally:
            health.close()

    def _live(self) -> None:
        bus = self._connect()
        self._watchdog.start()
        welcome = self._await_welcome(bus)
        if welcome is None:
            return
        runner = self._prepare(welcome)
        bus.send(Loaded(self._contract.stage, self._progress.memory_bytes))
        while not self._shutdown:
            self._serve(bus, runner)

    def _connect(self) -> StageBus:
        contract = self._contract
        self._progress.enter(Phase.CONNECTING, f"to the engine at {contract.master_addr}:{ports.PLAN_BUS}")
        try:
            bus = StageBus.connect(contract.master_addr, ports.PLAN_BUS, contract.config.timeouts.rendezvous_seconds)
        except TimeoutError as error:
            raise RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, str(error), operation="connect") from error
        self._bus = bus
        bus.send(
            Hello(
                protocol=PROTOCOL_VERSION,
                stage=contract.stage,
                stage_count=contract.stage_count,
                incarnation=contract.incarnation,
                token=contract.bus_token,
                host=host_identity(),
                available_bytes=available_bytes(),
                health_url=health_url(contract.pod_ip),
            )
        )
        return bus

    def _await_welcome(self, bus: StageBus) -> Welcome | None:
        """Wait for the engine's word (None: it drained); it has its own clock for stages that don't come."""
        while True:
            message = bus.receive(HANDSHAKE_POLL_SECONDS)
            self._tell_drain(bus)
            match message:
                case Welcome():
                    return message
                case Refused(detail=detail):
                    raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="handshake")
                case Shutdown():
                    return None
                case GroupFailed():
                    raise group_failure(message, self._contract.stage)
                case _:
                    continue

    def _prepare(self, welcome: Welcome) -> StageRunner:
        """Load, then meet the peers: no receive is outstanding while loading."""
        contract = self._contract
        try:
            config = read_model_config(Path(welcome.model_dir))
        except UnsupportedModelError as error:
            raise RuntimeFailure(FailureClass.MODEL_LOAD, str(error), operation="read the config") from error
        dtype = DTYPES[welcome.dtype]
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // welcome.stages_on_host))
        num_slots = welcome.num_cohorts * welcome.slots_per_cohort
        model = self._load(welcome, config, dtype)
        self._progress.hidden_token_bytes = config.hidden_size * dtype.itemsize
        self._progress.feedback_row_bytes = FEEDBACK_WIDTH * torch.int64.itemsize
        self._progress.num_slots = num_slots
        self._progress.slot_tokens = welcome.slot_tokens
        captured = capture(model, contract.config, welcome, self._progress)
        self._progress.enter(Phase.RENDEZVOUS, f"at {contract.master_addr}:{contract.master_port}")
        transport = self._join(config.hidden_size, dtype)
        self._progress.enter(Phase.WARMING, captured)
        return StageRunner(
            model,
            transport,
            self._clock,
            self._watchdog,
            stage=contract.stage,
            stage_count=contract.stage_count,
            num_slots=num_slots,
            hidden_size=config.hidden_size,
            dtype=dtype,
            guides=self._guides(Path(welcome.model_dir), config),
        )

    def _guides(self, model_dir: Path, config: ModelConfig) -> GuideMaker | None:
        """What guided decoding needs, on the stage that samples."""
        if self._contract.stage != self._contract.stage_count - 1:
            return None
        return GuideMaker(JsonGrammars(model_dir, config.vocab_size, config.eos_token_ids))

    def _load(self, welcome: Welcome, config: ModelConfig, dtype: torch.dtype) -> StageModel:
        layers = LayerRange(first=welcome.first_layer, last=welcome.last_layer)
        is_first, is_last = self._contract.stage == 0, self._contract.stage == self._contract.stage_count - 1
        self._progress.layers = layers
        self._progress.enter(Phase.LOADING)
        try:
            model = self._build_model(
                Path(welcome.model_dir),
                config,
                layers,
                is_first=is_first,
                is_last=is_last,
                dtype=dtype,
                num_cohorts=welcome.num_cohorts,
                slots_per_cohort=welcome.slots_per_cohort,
                slot_tokens=welcome.slot_tokens,
                progress=self._progress.loading,
            )
        except RuntimeError as error:
            raise allocation_failure(error) from error
        cache_tokens = welcome.num_cohorts * welcome.slots_per_cohort * welcome.slot_tokens
        kv_bytes = cache_tokens * config.kv_bytes_per_token(layers.count, dtype.itemsize)
        self._progress.memory_bytes = self._progress.total_bytes + kv_bytes
        return model

    def _join(self, hidden_size: int, dtype: torch.dtype) -> Transport:
        if self._contract.stage_count == 1:
            return LoopbackTransport()
        from stageline_runtime.transport.rendezvous import join  # torch.distributed costs time a lone stage can save

        return join(self._contract, hidden_size=hidden_size, dtype=dtype)

    def _serve(self, bus: StageBus, runner: StageRunner) -> None:
        """Take in what has come, run one plan."""
        self._tell_drain(bus)
        self._take(bus.receive(0), runner)
        while not self._plans and not self._shutdown:
            self._clock.enter(WaitReason.STARVED if self._outstanding else IDLE)
            self._tell_drain(bus)
            self._take(bus.receive(HANDSHAKE_POLL_SECONDS), runner)
        if not self._plans:
            return
        self._clock.enter(WaitReason.HOST)
        while (message := bus.receive(0)) is not None:
            self._take(message, runner)
        plan = self._plans.popleft()
        sampled = runner.run(plan)
        if runner.is_last:
            bus.send(StepDone(plan.seq, sampled))
        self._progress.count_step(plan, step_kind(plan))
        if plan.dummy:
            self._progress.enter(Phase.READY)

    def _take(self, message: ToStage | None, runner: StageRunner) -> None:
        match message:
            case StepPlan():
                runner.accept(message)
                self._plans.append(message)
            case Ping(engine_nanoseconds=asked):
                assert self._bus is not None, "a message came without a bus"
                received = self._clock.now_nanoseconds()
                moments = self._timeline.recent_moments()
                self._bus.send(Pong(asked, received, self._clock.now_nanoseconds(), moments))
            case WorkOutstanding(outstanding=outstanding):
                self._outstanding = outstanding
            case Shutdown():
                self._shutdown = True
            case GroupFailed():
                raise group_failure(message, self._contract.stage)
            case Welcome() | Refused():
                raise BusProtocolError("a second handshake")
            case None:
                pass

    def _tell_drain(self, bus: StageBus) -> None:
        if self._drain_asked and self._progress.phase is not Phase.DRAINING:
            self._progress.enter(Phase.DRAINING)
            bus.send(DrainRequested(self._contract.stage))

    def _on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """First SIGTERM asks the engine to drain the group; before there is an engine, or the second time, end."""
        if self._drain_asked or self._bus is None:
            os._exit(ExitCode.DRAINED)
        self._drain_asked = True

    def _engine_hung_up(self) -> bool:
        return self._bus is not None and self._bus.engine_hung_up()

    def _end(self, failure: RuntimeFailure) -> ExitCode:
        self._progress.enter(Phase.FAILED, failure.detail)
        return write_last_words(failure.message(self._contract.stage))

    def _end_now(self, failure: RuntimeFailure) -> NoReturn:
        if self._drain_asked and failure.failure_class is FailureClass.ENGINE_LOST:
            os._exit(ExitCode.DRAINED)
        os._exit(self._end(failure))
