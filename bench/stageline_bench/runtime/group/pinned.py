"""Runs a command on given cores, and ends all its processes with the benchmark: `pinned CORES COMMAND…`.

CORES is `0,1` or `any`. It is a separate small program, because affinity must be set before torch counts its threads.
It also stays as the leader of the command's session: the kernel signals it when the benchmark ends in any way, and it
then ends the whole session, including grandchildren.
"""

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the command to its end and return its status."""
    cores, *command = arguments
    parent = os.getppid()
    signal.signal(signal.SIGTERM, _end_session)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1  # the benchmark ended before the parent-death signal was set
    if cores != "any":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    process = subprocess.Popen(command)
    # Only the command holds the pipes, so that they close when it ends.
    for inherited in (0, 1):
        os.close(inherited)
    status = process.wait()
    return status if status >= 0 else 128 - status


def _end_session(_number: int, _frame: FrameType | None) -> NoReturn:
    # Only the own session: the benchmark starts this program as a session's leader.
    if os.getsid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
