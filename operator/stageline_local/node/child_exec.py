"""Runs as `python child_exec.py PARENT_PID COMMAND...`: ties the container's life to the node's, then `exec`s it.

The parent-death signal makes the kernel kill the container when the node dies, even by SIGKILL. The setting survives
`exec`. It is set before the parent is checked, so that a node that died in between is noticed. This runs before every
container, so it imports only the minimum of the standard library.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_COMMAND_NOT_FOUND = 127
_COMMAND_NOT_EXECUTABLE = 126


def main(arguments: list[str]) -> int:
    """`exec` the command; returns only if that fails."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.stderr.write(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}\n")
        return 1
    if os.getppid() != parent_pid:
        return 1
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        sys.stderr.write(f"command {command[0]!r} was not found on PATH\n")
        return _COMMAND_NOT_FOUND
    except OSError as error:
        sys.stderr.write(f"command {command[0]!r} can't be run: {error.strerror}\n")
        return _COMMAND_NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
