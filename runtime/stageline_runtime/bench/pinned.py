"""Run a command on given cores, and let it die with its parent: `pinned CORES COMMAND…`, CORES as `0,1` or `any`.

A separate tiny program because affinity must be set before torch counts its threads, and because code between fork
and exec in a threaded parent is unsafe. A benchmark that is killed leaves nothing behind: the kernel ends its children.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Become the command."""
    cores, *command = arguments
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # the parent ended before the kernel was told to watch it
    if cores != "any":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
