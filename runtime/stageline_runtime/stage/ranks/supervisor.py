"""The process of a stage's container where the stage has several ranks: starts them, answers for them, ends them.

It computes nothing, imports no torch and says nothing on the plan bus, on which each rank is a client of its own. When
one rank ends, the exchanges of all end; the others have a moment to say why they end, and are killed. The stage then
has one termination message, which names the rank. A rank never outlives its supervisor.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

from pydantic import ValidationError

from stageline_api import env
from stageline_api.failures import ExitCode, TerminationMessage
from stageline_runtime import bound_child
from stageline_runtime.contract import PodContract
from stageline_runtime.native.build import CompilerTooLateError, NativeUnavailableError, library_for_others
from stageline_runtime.planning.this_machine import kernel_kills
from stageline_runtime.ranks.rank_area import RankArea
from stageline_runtime.stage.ranks.ends import RankEnd, last_words_of
from stageline_runtime.stage.ranks.pages import RankPages
from stageline_runtime.stage.ranks.shared_kernels import no_shared_memory
from stageline_runtime.stage.telemetry.health import health_served
from stageline_runtime.termination import RuntimeFailure, pass_last_words_on

logger = logging.getLogger(__name__)

RANK_COMMAND: Final = ("-m", "stageline_runtime.stage.ranks.rank_process")
BUFFER_BYTES: Final = 4 << 20
"""Of each rank, twice; a larger exchange takes several rounds. Unused pages are never allocated."""
LAST_WORDS_SECONDS: Final = 1.5
"""How long ranks may take to end after the first one has failed: longer than a watchdog's look takes to come round."""
DRAINED_SECONDS: Final = 10.0
"""The same, after one has ended on request."""
VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


class StartedProcess(Protocol):
    """What a supervisor needs of a child, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """The exit status, negative for a signal, once it has ended."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def start_rank(command: Sequence[str], environment: Mapping[str, str], descriptors: tuple[int, ...]) -> StartedProcess:
    """An interpreter with these arguments and variables, which inherits `descriptors` and ends with this process."""
    return subprocess.Popen(
        bound_child.bound((sys.executable, *command)), env=environment, pass_fds=descriptors, stdin=subprocess.DEVNULL
    )


class RankProcess:
    """One rank: the process, the socket on which it answers, the memory for its termination message."""

    def __init__(self, rank: int, area: int, command: Sequence[str], given: Mapping[str, str]) -> None:
        """`given`: variables of its own, beside those by which it finds what it inherits."""
        self.rank = rank
        self._words = os.memfd_create(f"stageline-rank-{rank}")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")  # the kernel gives it a name that is no file's
        listener.listen()
        self.address: bytes = listener.getsockname()
        environment = {
            **os.environ,
            **given,
            env.STAGE_RANK: str(rank),
            env.RANK_AREA: str(area),
            env.RANK_HEALTH: str(listener.fileno()),
            env.TERMINATION_PATH: f"/proc/self/fd/{self._words}",
        }
        with listener:
            self.process = start_rank(command, environment, (self._words, area, listener.fileno()))
        self.pidfd = os.pidfd_open(self.process.pid)

    def last_words(self) -> TerminationMessage | None:
        """The rank's termination message; None if it wrote none."""
        data = os.pread(self._words, os.fstat(self._words).st_size, 0)
        try:
            return TerminationMessage.model_validate_json(data)
        except ValidationError:
            return None

    def close(self) -> None:
        """End it the hard way, if it hasn't."""
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)
        os.close(self._words)


def visible_device(rank: int, asked: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that lets a rank see one device, its own: of those that the container names, or has.

    `asked` is `spec.engine.device`. A rank without a remaining device sees none, and reports that or is rejected by the
    engine.
    """
    if asked == "cpu":
        return {}
    named = environ.get(VISIBLE_DEVICES)
    if named is None:
        return {VISIBLE_DEVICES: str(rank)}
    devices = [one.strip() for one in named.split(",") if one.strip()]
    return {VISIBLE_DEVICES: devices[rank] if rank < len(devices) else ""}


class RankSupervisor:
    def __init__(self, contract: PodContract, command: Sequence[str] = RANK_COMMAND) -> None:
        """`command`: arguments of the interpreter that make a rank."""
        self._contract = contract
        self._command = command
        self._ranks: list[RankProcess] = []
        self._kills_before = kernel_kills()
        self._drain_asked = False

    def run(self) -> int:
        """Live as long as all ranks do; the exit code of what ended the first."""
        descriptor = RankArea.create(self._contract.ranks, BUFFER_BYTES)
        area = RankArea(descriptor)
        signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            with tempfile.TemporaryDirectory(prefix="stageline-ranks-") as directory:
                os.environ[env.RANK_STORE] = f"{directory}/meeting"
                self._provide_kernels(Path(directory))
                return self._run(area, descriptor)
        except NativeUnavailableError as error:
            failure = no_shared_memory(self._contract.ranks, error, "start the ranks")
            return pass_last_words_on(failure.message(self._contract.stage))
        finally:
            for rank in self._ranks:
                rank.close()

    def _provide_kernels(self, directory: Path) -> None:
        """Compile the kernels once for all ranks, where these may compute on CPUs.

        Raises:
            NativeUnavailableError: they can't be compiled. Not where the ranks find the device (`auto`): ranks with
                devices need none, and a rank without one reports it.
        """
        device = self._contract.config.device
        if device == "cuda":
            return
        try:
            os.environ[env.NATIVE_LIBRARY] = str(library_for_others(directory))
        except CompilerTooLateError:
            raise
        except NativeUnavailableError as error:
            if device == "cpu":
                raise
            logger.warning("no compiled kernels, which ranks on CPUs can't do without: %s", error)

    def _run(self, area: RankArea, descriptor: int) -> int:
        for number in range(self._contract.ranks):
            given = visible_device(number, self._contract.config.device)
            self._ranks.append(RankProcess(number, descriptor, self._command, given))
        logger.info("started %d ranks: processes %s", len(self._ranks), [rank.process.pid for rank in self._ranks])
        pages = RankPages(self._contract, [rank.address for rank in self._ranks])
        try:
            with health_served(self._contract.pod_ip, pages):
                ends = self._ends(area)
        except RuntimeFailure as failure:
            return pass_last_words_on(failure.message(self._contract.stage))
        words = last_words_of(self._contract.stage, ends)
        return ExitCode.DRAINED if words is None else pass_last_words_on(words)

    def _ends(self, area: RankArea) -> list[RankEnd]:
        """How the ranks ended, in that order, except ranks that exceeded the time limit."""
        ends = self._ended(None)
        area.end()
        if self._drain_asked and all(end.status == 0 and end.words is None for end in ends):
            return ends  # asked to end before there was an engine: there are no streams to finish
        is_failure = any(end.is_failure for end in ends)
        deadline = time.monotonic() + (LAST_WORDS_SECONDS if is_failure else DRAINED_SECONDS)
        while len(ends) < len(self._ranks) and (left := deadline - time.monotonic()) > 0:
            new = self._ended(left, {end.rank for end in ends})
            ends += new
            if not is_failure and any(end.is_failure for end in new):
                is_failure, deadline = True, min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
        return ends

    def _ended(self, timeout_seconds: float | None, known: frozenset[int] | set[int] = frozenset()) -> list[RankEnd]:
        """The ranks beside `known` that have ended, as soon as there is one, or none within the time."""
        poll = select.poll()
        for rank in self._ranks:
            if rank.rank not in known:
                poll.register(rank.pidfd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(None if timeout_seconds is None else timeout_seconds * 1000)}
        return [self._end_of(rank) for rank in self._ranks if rank.pidfd in ready]

    def _end_of(self, rank: RankProcess) -> RankEnd:
        status = rank.process.wait()
        logger.info("rank %d has ended with status %d", rank.rank, status)
        if self._drain_asked and rank is self._ranks[0] and status == -signal.SIGTERM:
            status = ExitCode.DRAINED  # its libraries were still loading, so that it didn't know what to do with it
        return RankEnd(rank.rank, status, rank.last_words(), kernel_kills() > self._kills_before)

    def _on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """The first rank asks the engine to drain the group, for all; before there is one, or the second time, end."""
        if not self._ranks or self._drain_asked:
            raise SystemExit(int(ExitCode.DRAINED))
        self._drain_asked = True
        with suppress(ProcessLookupError):
            self._ranks[0].process.terminate()
