"""NCCL by itself, for a communicator of one rank: it starts, sums, and an operation that is overdue is told.

`python -m stageline_bench.gpu_check.nccl_start` prints what it found as JSON: a process of its own, since an error of
NCCL's may end one. What is told is what a stage's links ask (`accelerator.nccl.group_error`): so a pipeline hears of a
lost peer.
"""

import json
import sys
import time
from typing import Any, cast

import torch
from torch._C._distributed_c10d import HashStore

from stageline_bench.gpu_check.sections import CheckFailedError, Figures
from stageline_runtime.accelerator.cuda import CudaAccelerator
from stageline_runtime.accelerator.nccl import group_error, new_group
from stageline_runtime.accelerator.protocol import Accelerator

NCCL_SECONDS = 2.0
"""What an operation may take."""
LATE_SECONDS = 4.0
MOST_OVERDUE_SECONDS = 30.0
CYCLES_PER_SECOND = 2e9
"""More than a device's clock has, so that it sleeps as long as it should or longer."""


def report(accelerator: Accelerator) -> Figures:
    """Raises CheckFailedError where a sum is wrong, or an error is told where there is none, or none where there is."""
    group = new_group(HashStore(), 0, 1, NCCL_SECONDS)
    tensor = torch.full((4,), 3.0, device=accelerator.device)
    group.allreduce([tensor]).wait()
    if tensor.tolist() != [3.0] * 4:
        raise CheckFailedError(f"a sum over one rank changed its tensor: {tensor.tolist()}")
    if (error := group_error(group)) is not None:
        raise CheckFailedError(f"a sum that went well is said to have failed: {error}")
    said = _overdue(group, tensor, accelerator)
    group.abort()
    return {"version": ".".join(map(str, cast(Any, torch.cuda.nccl).version())), "an overdue sum": said}


def _overdue(group: Any, tensor: torch.Tensor, accelerator: Accelerator) -> str:
    """A sum behind work that takes longer than a sum may: what is told of it, and that the device goes on."""
    torch.cuda._sleep(int(LATE_SECONDS * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
    began = time.monotonic()
    group.allreduce([tensor]).wait()
    done = accelerator.main.record()
    while (error := group_error(group)) is None:
        if time.monotonic() - began > MOST_OVERDUE_SECONDS:
            raise CheckFailedError(f"overdue since {MOST_OVERDUE_SECONDS:g} s and not told; {done.is_done()=}")
        time.sleep(0.01)
    told_seconds = time.monotonic() - began
    done.wait()
    return f"{error.partition(';')[0]} after {told_seconds:.1f} s of {NCCL_SECONDS:g}"


def main() -> int:
    """Print the figures, or on standard error why there are none."""
    try:
        figures = report(CudaAccelerator())
    except (CheckFailedError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
