"""NCCL's communicators, as torch wraps them: how one is made, and how its errors are reported.

They are made directly rather than through torch's global default, so that nothing in a stage depends on global state.
torch's own watchdog would end the process without a termination message, so it only notes errors here; the stage's
watchdog looks at events.
"""

import os
from datetime import timedelta
from typing import Any, Final

import torch
from torch._C._distributed_c10d import Store

_SETTINGS: Final = {
    # Record errors but don't abort: an aborted receive would end without its data, and the device would continue with
    # that.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # A sticky CUDA error would be thrown again in torch's watchdog thread, which ends the process by SIGABRT.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # The flight recorder takes a traceback at each operation.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "TORCH_FR_BUFFER_SIZE": "0",  # its name since torch 2.12
    # After noting an error torch's watchdog sleeps four times this, a minute by default, with its list of operations
    # locked: whatever queues one waits.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
LINK_CTAS: Final = 2
"""Blocks of the device that a link's operation holds. A receive holds them while it waits for its peer."""


def new_group(store: Store, rank: int, size: int, timeout_seconds: float, *, is_link: bool = False) -> Any:
    """One rank's end of a communicator, which is connected at its first use; raises RuntimeError without NCCL.

    `is_link`: between two stages. Its operations are small and waited for, so they run on a stream of high priority
    and hold few blocks of the device.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL
    except ImportError as error:
        raise RuntimeError("this image's torch is built without NCCL") from error
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    if is_link:
        options.is_high_priority_stream = True
        options.config.max_ctas = LINK_CTAS
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    except ValueError as error:  # no device is there
        raise RuntimeError(str(error)) from error


def group_error(group: Any) -> str | None:
    """The first error that torch's watchdog has noted.

    It notes what its first look at an operation finds in a turn. What it finds later in that turn it notes at the next
    operation, or never; then the stage's own limits end it. Nobody aborts a communicator in use, so an operation that
    is over has its data. The operations themselves can't be asked: `WorkNCCL` refuses `is_success`, and its `exception`
    is deprecated and, in torch 2.11, a TypeError.
    """
    error = group.get_error().name
    return None if error == "SUCCESS" else f"NCCL reported {error}; its own words are in the log"


class NcclRanks:
    """Communicators for the ranks of a stage, each of which has a device of its own; a `RankBackend`."""

    name = "NCCL"

    def open(self, store: Store, rank: int, size: int, device: torch.device, timeout_seconds: float) -> Any:
        """Connecting begins here: at a first use within a step it would be waited for unseen.

        Raises:
            RuntimeError: NCCL can't be had, or refuses.
        """
        # Later versions connect for each algorithm at its first use, on the host and with all ranks at once.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        group = new_group(store, rank, size, timeout_seconds)
        group.eager_connect_single_device(device)
        return group

    def error(self, group: Any) -> str | None:
        """What went wrong in any exchange so far, if something did."""
        return group_error(group)
