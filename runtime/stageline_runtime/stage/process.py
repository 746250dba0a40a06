"""The life of a stage: connect to the engine, load its layers, meet its peers, run plans, end with a reason."""

import logging
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import NoReturn

import torch

from stageline_api.failures import ExitCode, FailureClass
from stageline_api.health import Phase
from stageline_api.standing_heap import settle_heap
from stageline_runtime.accelerator.cuda import load_kernels_eagerly
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract
from stageline_runtime.models.protocol import ModelBuilder
from stageline_runtime.plan_bus.bus import BusClosedError, StageBus
from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    CacheSized,
    Challenge,
    Computing,
    DrainRequested,
    GroupFailed,
    GuideReady,
    Loaded,
    Measured,
    Ping,
    Pong,
    PrepareGuide,
    Refused,
    Shutdown,
    StepDone,
    StepPlan,
    ToStage,
    Welcome,
    WorkOutstanding,
)
from stageline_runtime.plan_bus.step_plan import plan_of_rank
from stageline_runtime.ranks.stage_ranks import StageRanks
from stageline_runtime.stage.devices import Devices
from stageline_runtime.stage.failures import as_failure
from stageline_runtime.stage.group_end import ask_to_drain, group_failure
from stageline_runtime.stage.handshake import await_cache_size, await_welcome, connect, say_hello
from stageline_runtime.stage.load_stage import LoadedStage, StageLoader
from stageline_runtime.stage.memory_use import MemoryUse
from stageline_runtime.stage.ranks.inherited import InheritedRank
from stageline_runtime.stage.ranks.joining import JoinedRanks, join_ranks
from stageline_runtime.stage.step.in_flight import POLL_SECONDS, FinishedPlan, look_until
from stageline_runtime.stage.step.runner import StageRunner, step_kind
from stageline_runtime.stage.telemetry.health import StagePages, health_served
from stageline_runtime.stage.telemetry.metrics import StageMetrics
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.state_clock import IDLE, StateClock, Timeline, WaitReason
from stageline_runtime.stage.telemetry.watchdog import Watchdog
from stageline_runtime.termination import RuntimeFailure, write_drained, write_last_words
from stageline_runtime.transport.ring import link_address, listen

logger = logging.getLogger(__name__)

MESSAGE_POLL_SECONDS = 0.5


class StageProcess:
    """One stage from start to end; `run` returns the exit code."""

    def __init__(
        self,
        contract: PodContract,
        build_model: ModelBuilder | None = None,
        devices: Devices | None = None,
        inherited: InheritedRank | None = None,
    ) -> None:
        """`build_model` and `devices` are for stages that simulate time, or a device that isn't there. `inherited` is a
        rank's state from its supervisor."""
        self._contract = contract
        self._build_model = build_model
        self._devices = devices if devices is not None else Devices()
        self._joined = JoinedRanks(StageRanks())
        """The other ranks of the stage, once it has met them."""
        self._accelerator: Accelerator | None = None
        self._stage: LoadedStage | None = None
        self._timeline = Timeline()
        self._clock = StateClock(listener=self._timeline.mark)
        self._is_rank = is_rank = contract.ranks > 1
        self._progress = StageProgress(
            stage=contract.stage,
            stage_count=contract.stage_count,
            incarnation=contract.incarnation,
            clock=self._clock,
            timeline=self._timeline,
            is_rank=is_rank,
        )
        self._bus: StageBus | None = None
        self._inherited = inherited
        self._watchdog = Watchdog(
            contract.config.timeouts.step_seconds,
            self._engine_hung_up,
            self._end_now,
            late_ranks=(lambda: ()) if inherited is None else inherited.late_ranks,
            tell_computing=self._tell_computing,
            peer_computed_at=lambda: float("-inf") if self._bus is None else self._bus.peer_computed_at(),
        )
        self._plans: deque[StepPlan] = deque()
        """Whole, as they came."""
        self._parts: dict[int, StepPlan] = {}
        """By `seq`: what of each plan that isn't done runs here."""
        self._number_format = ""
        """What is computed in, and why."""
        self._outstanding = False
        self._drain_asked = False
        self._shutdown: Shutdown | None = None

    def run(self) -> ExitCode:
        """Live until the engine says to shut down (0) or something fails (the code of its class)."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        code = self._run()
        if self._accelerator is not None:
            # Work that waits for a lost peer never ends, and what torch tears down at exit waits for it.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    def _run(self) -> ExitCode:
        metrics = StageMetrics(self._progress, self._contract.config.served_name)
        listener = None if self._inherited is None else self._inherited.health
        try:
            with health_served(self._contract.pod_ip, StagePages(self._progress, metrics), listener):
                self._live()
        except Exception as error:
            failure = as_failure(error)
            if (asked_by := self._drained_by(failure)) is not None:
                return write_drained(self._contract.stage, asked_by)
            if failure is not error and failure.failure_class is FailureClass.INTERNAL:
                logger.exception("the stage failed unexpectedly")  # a bug: the log gets its traceback
            return self._end(failure)
        assert self._shutdown is not None, "it ends without having been told to"
        return write_drained(self._contract.stage, self._shutdown.reason)

    def _live(self) -> None:
        if self._contract.stage_count > 1 or self._is_rank:
            load_kernels_eagerly()
        self._accelerator = self._devices.choose(self._contract.config.device)
        listener = listen(self._contract) if self._contract.stage_count > 1 else None
        self._bus = bus = connect(self._contract, self._progress)
        say_hello(bus, self._contract, self._accelerator, None if listener is None else link_address(listener))
        self._watchdog.start()
        welcome = await_welcome(bus, self._contract.stage, self._tell_drain)
        if isinstance(welcome, Shutdown):
            self._shutdown = welcome
            return
        self._number_format = f"{welcome.dtype} ({welcome.dtype_reason})"
        self._joined = joined = join_ranks(
            self._contract,
            self._inherited,
            self._accelerator,
            self._devices.rank_backend,
            self._progress,
            self._watchdog,
        )
        loader = StageLoader(
            self._contract,
            self._progress,
            self._watchdog,
            self._accelerator,
            self._build_model,
            joined.ranks,
            self._devices.attention,
            listener,
        )
        stage = loader.load(welcome, self._agree_on_cache)
        if isinstance(stage, Shutdown):
            self._shutdown = stage
            return
        settle_heap()
        bus.send(Loaded(self._contract.stage, self._progress.memory_bytes))
        logger.info("loaded layers %d-%d, waiting for the first plan", welcome.first_layer, welcome.last_layer)
        self._stage = stage
        # Once for all steps: entering it runs a good deal of torch's own Python, which each step would find cold.
        with torch.inference_mode():
            while not self._shutdown:
                self._serve(bus, stage)

    def _agree_on_cache(self, use: MemoryUse | None) -> CacheSized | Shutdown:
        assert self._bus is not None, "it loads without having been welcomed"
        if use is not None:
            self._bus.send(Measured(self._contract.stage, use.held_bytes, use.step_bytes))
        return await_cache_size(self._bus, self._contract.stage, self._tell_drain)

    def _serve(self, bus: StageBus, stage: LoadedStage) -> None:
        """Handle the messages that have arrived, then run one plan."""
        self._tell_drain(bus)
        self._take_all(bus.receive(0), bus, stage.runner)  # one look at the socket is enough for a step
        if not self._plans:
            self._await_plan(bus, stage)
        if not self._plans:
            return
        self._tell_until_it_comes(bus, stage, self._plans[0])
        if self._shutdown:
            return
        plan = self._plans.popleft()
        self._joined.meet(plan, self._watchdog)
        part = self._parts[plan.seq]
        sampled = stage.runner.run(part)
        if stage.in_flight is not None:
            stage.in_flight.add(plan, sampled)
            self._finish_done(bus, stage)
            if (drafts := stage.runner.draft(part)) is not None:
                stage.in_flight.add_drafts(plan, sampled, drafts)
            return
        done = FinishedPlan(plan, sampled.rows())
        self._finish(bus, stage.runner, done)
        if (drafts := stage.runner.draft(part)) is not None:
            self._finish(bus, stage.runner, done._replace(drafted=drafts.drafted()))

    def _tell_until_it_comes(self, bus: StageBus, stage: LoadedStage, plan: StepPlan) -> None:
        """Keep reporting finished plans while the next plan's hidden tensor is in flight. Waiting for the tensor would
        delay the reports, and the engine may hold the following plan back until it knows the tokens."""
        if stage.runner.is_first or not stage.runner.tells:
            return

        def _look() -> None:
            self._take_all(bus.receive(0), bus, stage.runner)
            self._finish_done(bus, stage)

        look_until(
            _look, lambda: not stage.in_flight or bool(self._shutdown) or stage.transport.hidden_has_come(plan.seq)
        )

    def _await_plan(self, bus: StageBus, stage: LoadedStage) -> None:
        """Handle messages until one is a plan or says to end."""
        while not self._plans and not self._shutdown:
            if not stage.in_flight:
                self._clock.enter(WaitReason.STARVED if self._outstanding else IDLE)
            self._tell_drain(bus)
            self._await_message(bus, stage)
        if self._plans and not stage.in_flight:
            self._clock.enter(WaitReason.HOST)

    def _await_message(self, bus: StageBus, stage: LoadedStage) -> None:
        """Handle the next messages; while the device works, poll the bus and the device alternately."""
        if not stage.in_flight:
            self._take_all(bus.receive(MESSAGE_POLL_SECONDS), bus, stage.runner)
            return
        self._take_all(bus.receive(0), bus, stage.runner)
        self._finish_done(bus, stage)
        if stage.in_flight and not self._plans:
            time.sleep(POLL_SECONDS)

    def _finish_done(self, bus: StageBus, stage: LoadedStage) -> None:
        assert stage.in_flight is not None, "nothing is in flight on a CPU"
        if stage.in_flight:
            # What a lost peer owes is never done: only its link tells.
            stage.transport.check(stage.in_flight.oldest_seq)
            if self._joined.on_devices is not None:
                self._joined.on_devices.check()
        for done in stage.in_flight.finished():
            self._finish(bus, stage.runner, done)

    def _finish(self, bus: StageBus, runner: StageRunner, done: FinishedPlan) -> None:
        """Report a finished plan to the engine, then its drafts; count it once that is all."""
        plan = done.plan
        if done.drafted is not None:
            bus.send(done.drafted)
        elif runner.tells:
            bus.send(StepDone(plan.seq, done.rows, runner.take_reports(plan)))
        if done.drafted is None and runner.drafts_after(self._parts[plan.seq]):
            return
        del self._parts[plan.seq]
        record = self._progress.count_step(plan, step_kind(plan), drafted=done.drafted is not None)
        if plan.report_times and self._contract.rank == 0:
            bus.send(record.times())
        if plan.dummy:
            self._progress.enter(Phase.READY, self._number_format)

    def _part(self, plan: StepPlan) -> StepPlan:
        """What of a plan is this rank's: all of it, unless requests belong to one rank each."""
        return plan_of_rank(plan, self._contract.rank, self._contract.config.expert)

    def _take_all(self, message: ToStage | None, bus: StageBus, runner: StageRunner) -> None:
        """Handle a message and all that came with it."""
        while message is not None:
            self._take(message, runner)
            message = bus.received()

    def _take(self, message: ToStage, runner: StageRunner) -> None:
        match message:
            case StepPlan():
                self._parts[message.seq] = part = self._part(message)
                runner.accept(part)
                self._plans.append(message)
            case Ping(engine_nanoseconds=asked):
                assert self._bus is not None, "a message came without a bus"
                received = self._clock.now_nanoseconds()
                moments = self._timeline.recent_moments()
                self._bus.send(Pong(asked, received, self._clock.now_nanoseconds(), moments))
            case PrepareGuide(number=number, schema=schema):
                assert self._bus is not None, "a message came without a bus"
                runner.prepare_guide(schema, partial(_say_guide_ready, self._bus, number))
            case WorkOutstanding(outstanding=outstanding):
                self._outstanding = outstanding
            case Shutdown():
                self._shutdown = message
            case GroupFailed():
                raise group_failure(message, self._contract.stage)
            case Challenge() | Welcome() | CacheSized() | Refused():
                raise BusProtocolError("a second handshake")

    def _tell_drain(self, bus: StageBus) -> None:
        if self._drain_asked:
            ask_to_drain(bus, self._progress)

    def _on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """First SIGTERM asks the engine to drain the group; before there is an engine, or the second time, end."""
        if self._drain_asked or self._bus is None:
            os._exit(ExitCode.DRAINED)
        self._drain_asked = True
        if self._progress.phase in (Phase.LOADING, Phase.RENDEZVOUS):
            # This may take minutes yet, and no other code uses the bus until then.
            self._bus.send(DrainRequested(self._contract.stage))

    def _drained_by(self, failure: RuntimeFailure) -> str | None:
        """Origin of the drain, if it explains a lost engine, or a lost peer once the engine has reported that."""
        if failure.failure_class is FailureClass.ENGINE_LOST and self._drain_asked:
            return f"SIGTERM to stage {self._contract.stage}"
        is_loss = failure.failure_class in (FailureClass.ENGINE_LOST, FailureClass.PEER_LOST)
        if not is_loss or self._bus is None:
            return None
        message = self._bus.unread_end() or self._shutdown  # in this order: the message may move between the two
        return message.reason if isinstance(message, Shutdown) else None

    def _tell_computing(self, step: int) -> None:
        if self._bus is not None:
            with suppress(BusClosedError):  # the main thread finds that out
                self._bus.send_if_free(Computing(step))

    def _engine_hung_up(self) -> bool:
        return self._bus is not None and self._bus.engine_hung_up()

    def _end(self, failure: RuntimeFailure) -> ExitCode:
        self._progress.enter(Phase.FAILED, failure.detail)
        return write_last_words(failure.message(self._contract.stage))

    def _end_now(self, failure: RuntimeFailure) -> NoReturn:
        if (asked_by := self._drained_by(failure)) is not None:
            os._exit(write_drained(self._contract.stage, asked_by))
        if failure.failure_class is FailureClass.ENGINE_LOST and self._bus is not None:
            told = self._bus.unread_end()
            failure = group_failure(told, self._contract.stage) if isinstance(told, GroupFailed) else failure
        os._exit(self._end(failure))


def _say_guide_ready(bus: StageBus, number: int) -> None:
    """Called by the thread that compiles, which learns nothing of the group's end."""
    with suppress(BusClosedError):
        bus.send(GuideReady(number))
