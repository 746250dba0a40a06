"""NCCL's communicators, as torch wraps them: how one is made, and how its errors are told. A lone rank's communicator
has run on a GPU, and none of several (docs/gpu.md).

They are made directly rather than through torch's global default, so that nothing in a stage depends on global state.
torch's own watchdog would end the process without last words, so it only cleans up after errors here; the stage's
watchdog looks at events.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store


def new_group(store: Store, rank: int, size: int, timeout_seconds: float) -> Any:
    """One rank's end of a communicator, which is connected at its first use; raises RuntimeError without NCCL."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # abort communicators, don't end the process
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    # Between noting an error and giving up the communicator torch's watchdog sleeps four times this, a minute as it
    # comes, with its list of operations locked: whoever queues one waits, and so does the end of the group's object.
    # Not at once either: what is given up goes on without its data, and a stage that looks is to know of it before.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100")
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL
    except ImportError as error:
        raise RuntimeError("this image's torch is built without NCCL") from error
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    try:
        return ProcessGroupNCCL(store, rank, size, options)
    except ValueError as error:  # no device is there
        raise RuntimeError(str(error)) from error


def group_error(group: Any) -> str | None:
    """The first error that torch's watchdog has noted, which it does before it aborts the communicator.

    It notes what its first look at an operation finds in a turn. What it finds later in that turn it notes at the next
    operation, or never; then the stage's own limits end it. Nobody but the watchdog aborts a communicator in use, and
    what NCCL has queued ends only well or by that: an operation that is over without an error here has its data. The
    operations themselves can't be asked: `WorkNCCL` refuses `is_success`, and its `exception` is deprecated and, in
    torch 2.11, a TypeError.
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
