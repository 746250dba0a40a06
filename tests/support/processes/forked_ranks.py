"""Ranks of tests as forks of their supervisor, which is itself a fork of one process that has imported torch.

`start_rank` takes the place of `stage.ranks.supervisor.start_rank` in the fork server, and so in all that it forks: a
rank has its descriptors, variables, signals and exit status, is a child of its supervisor and ends with it. What it
doesn't show is that an interpreter of its own gets as far: the groups that are `is_fresh` have those.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Final

from processes import fork_server
from stageline_api import env

NAME: Final = "rank "
"""What a fork is called (`/proc/PID/comm`), before its number: `/proc/PID/environ` is the fork server's."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class ForkedRank:
    """A fork, with the part of `subprocess.Popen` that a supervisor uses."""

    def __init__(self, process: ForkProcess) -> None:
        """`process` has been started."""
        assert process.pid is not None
        self.pid = process.pid
        self._process = process

    def wait(self) -> int:
        """The exit status, negative for a signal, once it has ended."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()


def start_rank(command: Sequence[str], environment: Mapping[str, str], descriptors: tuple[int, ...]) -> ForkedRank:
    """A fork that does what `python *command` would do; it has `descriptors` and all others of its supervisor."""
    del descriptors  # a fork has them without more ado
    # A fork has this thread alone: whatever another one held would stay locked in it for ever.
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "the supervisor has started a thread"
    process = multiprocessing.get_context("fork").Process(
        target=_become_rank, args=(os.getpid(), list(command), dict(environment))
    )
    process.start()
    return ForkedRank(process)


def _become_rank(supervisor: int, command: list[str], environment: dict[str, str]) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # the supervisor's handlers are not for a rank
        signal.signal(number, signal.SIG_DFL)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_NAME, f"{NAME}{environment[env.STAGE_RANK]}".encode())
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        sys.exit(1)
    job = fork_server.Job(arguments=command, environment=environment, directory=str(Path.cwd()))
    fork_server.become(job, os.dup(2))
