"""Work whose cost nobody knows, each in a process forked for it: what is given up costs that process alone.

The kernel ends the fork once it has had its CPU time, whatever library it is in. What this process has read is there in
the fork, so the next one waits for no start.
"""

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_MOST_ANSWER_BYTES: Final = 64 * 1024


def end_with_parent() -> None:
    """Have the kernel end this process when who started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Fork:
    """Runs `work` for up to `cpu_seconds`. Once ended it is a zombie, whose `pid` is nobody else's, until buried."""

    def __init__(self, work: Callable[[], str], cpu_seconds: float) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _work(work, cpu_seconds, writing)
        os.close(writing)

    def answer(self) -> tuple[str, bool]:
        """What the work came to, once it has ended: empty when it was ended, and whether it ran out of CPU time."""
        with os.fdopen(self._reading, "rb") as said:
            answer = said.read()
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        went_well = ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status == 0
        is_over_time = ended is not None and ended.si_code == os.CLD_KILLED and ended.si_status == signal.SIGPROF
        return answer.decode() if went_well else "", is_over_time

    def bury(self) -> None:
        os.waitpid(self.pid, 0)


def _work(work: Callable[[], str], cpu_seconds: float, writing: int) -> None:
    """In the fork; never returns."""
    try:
        # A fork inherits neither this nor a timer.
        end_with_parent()
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        with os.fdopen(writing, "wb") as said:
            said.write(work().encode()[:_MOST_ANSWER_BYTES])
    except BaseException:
        os._exit(1)
    os._exit(0)
