"""NCCL alone, for a communicator of one rank: it starts, sums, and reports an overdue operation.

`python -m stageline_bench.gpu_check.nccl_start` prints the result as JSON. It is a separate process, because an NCCL
error may end it. It uses the same query as a stage's links (`accelerator.nccl.group_error`), by which a pipeline
detects a lost peer.
"""

import json
import os
import sys
import time
from typing import Any, NoReturn, cast

import torch
from torch._C._distributed_c10d import HashStore

from stageline_bench.gpu_check.sections import CheckFailedError, Figures
from stageline_runtime.accelerator.cuda import CudaAccelerator
from stageline_runtime.accelerator.nccl import group_error, new_group
from stageline_runtime.accelerator.protocol import Accelerator

MAX_OPERATION_SECONDS = 2.0
"""Time after which an operation is overdue."""
LATE_SECONDS = 4.0
MAX_OVERDUE_SECONDS = 30.0
CYCLES_PER_SECOND = 3e9
"""About the fastest clock of a card. Slower ones sleep longer; below twice this clock the sleep exceeds the limit."""


def report(group: Any, accelerator: Accelerator) -> Figures:
    """Raises CheckFailedError if a sum is wrong, or an error is reported without a cause, or not reported."""
    tensor = torch.full((4,), 3.0, device=accelerator.device)
    group.allreduce([tensor]).wait()
    if tensor.tolist() != [3.0] * 4:
        raise CheckFailedError(f"a sum over one rank changed its tensor: {tensor.tolist()}")
    if (error := group_error(group)) is not None:
        raise CheckFailedError(f"a sum that went well is said to have failed: {error}")
    said = _overdue(group, tensor, accelerator)
    return {"version": ".".join(map(str, cast(Any, torch.cuda.nccl).version())), "an overdue sum": said}


def _overdue(group: Any, tensor: torch.Tensor, accelerator: Accelerator) -> str:
    """A sum after work that takes longer than a sum may: its reported error, and that the device continues."""
    torch.cuda._sleep(int(LATE_SECONDS * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
    began = time.monotonic()
    group.allreduce([tensor]).wait()
    done = accelerator.main.record()
    while (error := group_error(group)) is None:
        if time.monotonic() - began > MAX_OVERDUE_SECONDS:
            past = "has" if done.is_done() else "has not"
            raise CheckFailedError(
                f"a sum that may take {MAX_OPERATION_SECONDS:g} s is not told as overdue after "
                f"{MAX_OVERDUE_SECONDS:g} s; the device {past} come past it"
            )
        time.sleep(0.01)
    told_seconds = time.monotonic() - began
    done.wait()
    return f"{error.partition(';')[0]} after {told_seconds:.1f} s of {MAX_OPERATION_SECONDS:g}"


def main() -> NoReturn:
    """Print the figures, or the failure on standard error, and exit."""
    status = 0
    try:
        accelerator = CudaAccelerator()
        group = new_group(HashStore(), 0, 1, MAX_OPERATION_SECONDS)
        sys.stdout.write(json.dumps(report(group, accelerator)))
    except CheckFailedError as error:
        sys.stderr.write(f"{error}\n")
        status = 1
    except Exception as error:  # any error of torch or NCCL: it must not leave this function with the group
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit while `group` is alive. Its destructor joins torch's watchdog thread, which may be aborting the communicator
    # and would delay the exit without any output.
    os._exit(status)


if __name__ == "__main__":
    main()
