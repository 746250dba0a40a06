"""The life of a vLLM stage: handshake with the engine, start of the node with its cut, supervision, end with a reason.

One thread checks everything ten times a second: the bus, the child, the workers' files, the clock. A message and
the end of the child or of a worker wake it at once. The first of these that it sees ends the stage: the engine's
message, a closed bus (the engine is gone), the child's exit, a worker that failed or vanished while its node runs,
or steps that don't advance. In every case the child and its workers end before this process does, and one
termination message gives the reason.
"""

import http.client
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from stageline_api import ports
from stageline_api.failures import ExitCode, FailureClass
from stageline_api.health import Phase
from stageline_api.runtime_config import LayerRange
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.bus import BusClosedError, StageBus
from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    CacheSized,
    Challenge,
    GroupFailed,
    Loaded,
    Ping,
    Pong,
    PrepareGuide,
    Refused,
    Shutdown,
    StepPlan,
    ToStage,
    Welcome,
    WorkOutstanding,
)
from stageline_runtime.planning.this_machine import MEMORY_EVENTS, kernel_kills
from stageline_runtime.stage.group_end import ask_to_drain, group_failure
from stageline_runtime.stage.handshake import await_welcome, connect, say_hello
from stageline_runtime.stage.telemetry.health import StagePages, health_served
from stageline_runtime.termination import RuntimeFailure, write_drained, write_last_words
from stageline_vllm.addresses import http_host
from stageline_vllm.plugin_path import write_plugin_path
from stageline_vllm.server_key import authorization, server_key
from stageline_vllm.supervisor.adapters import check_adapters
from stageline_vllm.supervisor.child import (
    VllmChild,
    descriptor_of_end,
    is_running,
    is_stopped,
)
from stageline_vllm.supervisor.model_code import check_model_code
from stageline_vllm.supervisor.outcome import Forgetting, NodeEnd, failure_of, first_of, is_lost_connection
from stageline_vllm.supervisor.package_path import link_packages
from stageline_vllm.supervisor.scratch import Scratch, short_temporary_directory
from stageline_vllm.supervisor.step_watchdog import StepWatchdog, WorkerView
from stageline_vllm.supervisor.vllm_command import OWN_TIMEOUT_GRACE_SECONDS, node_environment, node_words
from stageline_vllm.supervisor.worker_account import FreshMetrics, Workers, WorkerTimeline, account_of
from stageline_vllm.versions import VllmVersionError, installed_vllm, require_supported
from stageline_vllm.worker_state import WorkerPhase

logger = logging.getLogger(__name__)

INTERPRETER_VARIABLE: Final = "STAGELINE_VLLM_PYTHON"
"""The Python that has vLLM, where it is another one than the supervisor's."""
_NUMA_NODES: Final = Path("/sys/devices/system/node")
LOOK_SECONDS: Final = 0.1
NOTE_SECONDS: Final = 1.0
HEALTH_ANSWER_SECONDS: Final = 2.0
VANISHED_SECONDS: Final = 0.3
"""How long a worker's end may stay unexplained.

Its last messages are logged before it ends, and its node's once the node notices; without any it was killed. A worker
that failed has recorded why, and has this long for its log.
"""
DYING_SECONDS: Final = 60.0
"""How long vLLM may take from its own limit for a step to its end."""
CONSEQUENCE_SECONDS: Final = 5.0
"""How long the engine may take to name the lost peer, when a node ended because of a lost connection."""
CHILD_GRACE_SECONDS: Final = 8.0
"""How long vLLM may take to exit after SIGTERM; it is drained by then and has no work left."""


class Supervisor:
    """One vLLM node from start to end; `run` returns the exit code."""

    def __init__(
        self, contract: PodContract, environ: Mapping[str, str] = os.environ, memory_events: Path = MEMORY_EVENTS
    ) -> None:
        self._contract = contract
        self._environ = environ
        self._memory_events = memory_events
        self._kills_before = kernel_kills(memory_events)
        self._scratch = Scratch(short_temporary_directory(environ))
        self._state_dir = self._scratch.path / "state"
        self._state_dir.mkdir()
        self._workers = Workers(self._state_dir, contract.config.tensor)
        self._progress = account_of(
            self._workers,
            stage=contract.stage,
            stage_count=contract.stage_count,
            incarnation=contract.incarnation,
        )
        self._watchdog = StepWatchdog(contract.config.timeouts.step_seconds, contract.stage, contract.stage_count)
        self._bus: StageBus | None = None
        self._child: VllmChild | None = None
        self._outstanding = False
        self._drain_asked = False
        self._shutdown: Shutdown | None = None
        self._awaited_ends: set[int] = set()
        self._vanished_since: float | None = None
        self._noted = 0.0

    def run(self) -> ExitCode:
        """Run until the engine requests shutdown (0) or a failure occurs (the exit code of its class)."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            metrics = FreshMetrics(self._progress, self._contract.config.served_name)
            with health_served(self._contract.pod_ip, StagePages(self._progress, metrics)):
                self._live()
        except Exception as error:
            return self._failed(_as_failure(error))
        assert self._shutdown is not None, "it ends without having been told to"
        self._end_child(CHILD_GRACE_SECONDS)
        return write_drained(self._contract.stage, self._shutdown.reason)

    def _failed(self, failure: RuntimeFailure) -> ExitCode:
        asked_by = self._drained_by(failure)
        self._end_child(CHILD_GRACE_SECONDS if asked_by is not None else 0.0)
        if asked_by is not None:
            return write_drained(self._contract.stage, asked_by)
        if failure.failure_class is FailureClass.INTERNAL and failure.__cause__ is not None:
            logger.error("the supervisor failed unexpectedly", exc_info=failure.__cause__)
        self._progress.enter(Phase.FAILED, failure.detail)
        return write_last_words(failure.message(self._contract.stage))

    def _live(self) -> None:
        interpreter = Path(self._environ.get(INTERPRETER_VARIABLE) or sys.executable)
        installed = installed_vllm(interpreter)
        require_supported(installed)
        self._bus = bus = connect(self._contract, self._progress)
        say_hello(bus, self._contract, None)
        welcome = await_welcome(bus, self._contract.stage, self._tell_drain)
        if isinstance(welcome, Shutdown):
            self._shutdown = welcome
            return
        check_model_code(Path(welcome.model_dir), self._contract.config.extra_args)
        check_adapters(self._contract.config.lora_adapters, self._contract.config.extra_args)
        self._progress.layers = LayerRange(first=welcome.first_layer, last=welcome.last_layer)
        self._progress.enter(Phase.LOADING, f"vLLM {installed.version} loads {welcome.model_dir}")
        plugin_path = link_packages(write_plugin_path(self._scratch.path / "path", installed))
        words = (str(interpreter), *self._words(welcome))
        self._child = VllmChild(words, self._child_environ(welcome, plugin_path), self._forgetting())
        self._wake_on_end(bus, self._child.pid)
        while self._shutdown is None:
            self._look(bus, self._child)

    def _words(self, welcome: Welcome) -> tuple[str, ...]:
        return node_words(self._contract, welcome, self._environ)

    def _child_environ(self, welcome: Welcome, plugin_path: Path) -> dict[str, str]:
        return node_environment(
            self._contract,
            welcome,
            self._environ,
            state_dir=self._state_dir,
            scratch=self._scratch.path,
            python_path=(plugin_path,),
            cores=tuple(sorted(os.sched_getaffinity(0))),
            num_memories=max(1, len(list(_NUMA_NODES.glob("node[0-9]*")))),
        )

    def _forgetting(self) -> Forgetting:
        """vLLM has as many steps under way as there are stages, or two where it schedules ahead. Twice as many may end
        after a failure: on a GPU those before it are seen to end late."""
        under_way = max(2, self._contract.stage_count)
        limit = self._contract.config.timeouts.step_seconds + OWN_TIMEOUT_GRACE_SECONDS
        return Forgetting(steps=2 * under_way, seconds=limit + DYING_SECONDS)

    def _look(self, bus: StageBus, child: VllmChild) -> None:
        """One pass: checks the engine's messages, the child, the workers' files."""
        self._tell_drain(bus)
        self._take(bus.receive(LOOK_SECONDS))
        while self._shutdown is None and (message := bus.receive(0)) is not None:
            self._take(message)
        if self._shutdown is not None:
            return
        if (status := child.poll()) is not None:
            raise self._end_of_child(bus, child, status)
        self._note_clock()
        self._watch_workers(bus, child)
        if self._vanished_since is None:
            self._await_ready(bus, child)
        self._forget_the_harmless(child)

    def _forget_the_harmless(self, child: VllmChild) -> None:
        phases = {state.life.phase for state in self._workers.states().values()}
        if phases == {WorkerPhase.READY} and self._progress.phase not in (Phase.LOADING, Phase.WARMING):
            child.lives_on(self._progress.steps)

    def _wake_on_end(self, bus: StageBus, pid: int) -> None:
        if pid not in self._awaited_ends:
            self._awaited_ends.add(pid)
            if (descriptor := descriptor_of_end(pid)) is not None:
                bus.wake_once(descriptor)

    def _take(self, message: ToStage | None) -> None:
        match message:
            case WorkOutstanding(outstanding=outstanding):
                self._outstanding = outstanding
            case Ping(engine_nanoseconds=asked):
                assert self._bus is not None, "a message came without a bus"
                now = time.monotonic_ns()
                moments = self._progress.timeline.recent_moments()
                self._bus.send(Pong(asked, now, time.monotonic_ns(), moments))
            case Shutdown():
                self._shutdown = message
            case GroupFailed():
                raise group_failure(message, self._contract.stage)
            case Challenge() | Welcome() | CacheSized() | Refused():
                raise BusProtocolError("a second handshake")
            case StepPlan() | PrepareGuide():
                raise BusProtocolError("a plan for a stage that vLLM schedules")
            case None:
                pass

    def _note_clock(self) -> None:
        self._progress.refresh()
        if time.monotonic() - self._noted >= NOTE_SECONDS:
            self._noted = time.monotonic()
            assert isinstance(self._progress.timeline, WorkerTimeline), "made by account_of"
            self._progress.timeline.note()

    def _await_ready(self, bus: StageBus, child: VllmChild) -> None:
        """Notify the engine once all workers of this stage are ready, and in stage 0 vLLM's server too."""
        if self._progress.phase not in (Phase.LOADING, Phase.WARMING):
            return
        phase = self._workers.phase()
        if phase is WorkerPhase.WARMING:
            self._progress.enter(Phase.WARMING, "vLLM warms up")
        if phase is not WorkerPhase.READY or (self._contract.stage == 0 and not self._server_answers()):
            child.starts()
            return
        child.got_ready()
        self._progress.enter(Phase.READY)
        bus.send(Loaded(self._contract.stage, self._progress.memory_bytes))

    def _server_answers(self) -> bool:
        contract = self._contract
        key = server_key(contract.bus_token, contract.group, contract.incarnation)
        connection = http.client.HTTPConnection(
            http_host(contract.pod_ip), ports.VLLM_HTTP, timeout=HEALTH_ANSWER_SECONDS
        )
        try:
            connection.request("GET", "/health", headers={"Authorization": authorization(key)})
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _watch_workers(self, bus: StageBus, child: VllmChild) -> None:
        states = self._workers.states()
        for state in states.values():
            self._wake_on_end(bus, state.life.pid)
        lives = [state.life for state in states.values()]
        if not any(life.message or not is_running(life.pid) for life in lives):
            self._vanished_since = None
        elif self._vanished_since is None:
            self._vanished_since = time.monotonic()
        elif child.said_worker_died or time.monotonic() - self._vanished_since > VANISHED_SECONDS:
            raise self._end_of_child(bus, child, 1, worker_vanished=True)
        if self._progress.phase is not Phase.READY and not self._drain_asked:
            return
        views = {rank: WorkerView(state=state, is_stopped=is_stopped(state.life.pid)) for rank, state in states.items()}
        failure = self._watchdog.look(views, time.monotonic(), outstanding=self._outstanding)
        if failure is not None:
            raise failure

    def _end_of_child(
        self, bus: StageBus, child: VllmChild, status: int, *, worker_vanished: bool = False
    ) -> RuntimeFailure:
        end = NodeEnd(
            status=status,
            words=child.words,
            last_line=child.last_line,
            phase=self._workers.phase(),
            failed=first_of(self._workers.failures()),
            kernel_kills=kernel_kills(self._memory_events) - self._kills_before,
            worker_vanished=worker_vanished or child.said_worker_died,
            engine_died=child.said_engine_died,
            adapter_failed=child.said_adapter_failed,
        )
        if is_lost_connection(end):
            self._hear_who_was_lost(bus)
        return failure_of(end)

    def _hear_who_was_lost(self, bus: StageBus) -> None:
        """A node that lost a connection is a consequence; the engine may be about to say of what (it then raises)."""
        deadline = time.monotonic() + CONSEQUENCE_SECONDS
        while self._shutdown is None and time.monotonic() < deadline:
            self._take(bus.receive(LOOK_SECONDS))

    def _tell_drain(self, bus: StageBus) -> None:
        if self._drain_asked:
            ask_to_drain(bus, self._progress)

    def _on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """The first SIGTERM asks the engine to drain the group; before there is an engine, or the second time, it
        ends."""
        if self._drain_asked or self._bus is None:
            self._end_child(0.0)
            os._exit(ExitCode.DRAINED)
        self._drain_asked = True

    def _drained_by(self, failure: RuntimeFailure) -> str | None:
        """The origin of the drain, if it explains a lost engine or peer, or a node that ended with it."""
        if self._drain_asked and failure.failure_class is FailureClass.ENGINE_LOST:
            return f"SIGTERM to stage {self._contract.stage}"
        if self._bus is None or failure.failure_class in (FailureClass.STEP_TIMEOUT, FailureClass.OUT_OF_MEMORY):
            return None
        message = self._bus.unread_end() or self._shutdown
        return message.reason if isinstance(message, Shutdown) else None

    def _worker_pids(self) -> list[int]:
        return [state.life.pid for state in self._workers.states().values()]

    def _end_child(self, grace_seconds: float) -> None:
        if self._child is not None:
            self._child.end(grace_seconds, self._worker_pids())
        self._scratch.remove()


def _as_failure(error: Exception) -> RuntimeFailure:
    match error:
        case RuntimeFailure():
            return error
        case VllmVersionError():
            detail = f"{error} ({INTERPRETER_VARIABLE} names the Python that has vLLM)"
            return RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="check vLLM's version")
        case BusClosedError() | BusProtocolError():
            return RuntimeFailure(FailureClass.ENGINE_LOST, str(error), operation="plan bus")
        case OSError():
            return RuntimeFailure(FailureClass.INTERNAL, f"vLLM can't be started: {error}", operation="start vLLM")
        case _:
            failure = RuntimeFailure(FailureClass.INTERNAL, f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
