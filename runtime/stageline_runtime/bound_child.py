"""Runs as `python bound_child.py PARENT_PID COMMAND...`: ties the command's life to its parent's, then `exec`s it.

The kernel kills the command when the parent ends, even by SIGKILL. The setting survives `exec`, and is asked for before
the parent is checked. Standard library only.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
COMMAND_NOT_RUNNABLE = 127


def bound(command: Sequence[str]) -> list[str]:
    """The words that start `command` as a child which ends with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(arguments: list[str]) -> int:
    """Become the command; returns only when that fails."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"command {command[0]!r} can't be run: {error.strerror}\n")
        return COMMAND_NOT_RUNNABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
