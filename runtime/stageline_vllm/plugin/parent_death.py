"""The entry point `vllm.general_plugins` by which vLLM's own children end with whoever started them.

A supervisor that is killed takes `vllm serve` along, by the kernel, and can do nothing more. vLLM's engine core doesn't
look for its parent: it, its workers and the memory that they hold would stay for good where no container goes with the
supervisor, as under `stageline up`. So each of them asks the kernel for the same, when it loads this.
"""

import ctypes
import multiprocessing
import os
import signal
from typing import Final

from stageline_vllm.worker_state import DIRECTORY_VARIABLE

_PR_SET_PDEATHSIG: Final = 1


def register() -> None:
    """Called by vLLM, in each of its processes and maybe more than once; does nothing in one that vLLM didn't start."""
    parent = multiprocessing.parent_process()
    if parent is None or not os.environ.get(DIRECTORY_VARIABLE):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        # It ended before it could be asked for.
        os.kill(os.getpid(), signal.SIGKILL)
