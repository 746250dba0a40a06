"""The entry point `vllm.general_plugins` by which vLLM's child processes end with their parent.

The kernel ends `vllm serve` when its supervisor is killed; the supervisor itself can do no more then. vLLM's engine
core doesn't watch its parent: without a container that ends with the supervisor, as under `stageline up`, the core
and its workers would keep running and hold their memory. So each of them requests a parent-death signal from the
kernel when it loads this.
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
        # The parent ended before the signal was requested.
        os.kill(os.getpid(), signal.SIGKILL)
