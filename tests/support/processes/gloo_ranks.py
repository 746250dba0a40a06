"""Exchanges of ranks whose device is the CPU in disguise: gloo's communicators behind the interface of NCCL's."""

import os
import signal
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ProcessGroupGloo,
    ReduceScatterOptions,
    Store,
)


class GlooGroup:
    """One end of gloo's communicator, which answers as `ProcessGroupNCCL` of torch 2.8 and later does: what isn't asked
    for beside the compute has no work to wait for.
    """

    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group: Any = group

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> None:
        assert not options.asyncOp
        self._group.allreduce(tensors, options).wait()

    def _allgather_base(self, gathered: Tensor, own: Tensor, options: AllgatherOptions) -> None:
        assert not options.asyncOp
        self._group._allgather_base(gathered, own, options).wait()

    def _reduce_scatter_base(self, own: Tensor, parts: Tensor, options: ReduceScatterOptions) -> None:
        assert not options.asyncOp
        self._group._reduce_scatter_base(own, parts, options).wait()

    def abort(self) -> None:
        self._group.abort()


class GlooRanks:
    """A `RankBackend`. `stopped` names a rank that stands still as it opens its end, for ever."""

    name = "gloo"

    def __init__(self, stopped: int | None = None) -> None:
        self._stopped = stopped

    def open(self, store: Store, rank: int, size: int, device: torch.device, timeout_seconds: float) -> Any:
        assert device.type == "cpu", device
        if rank == self._stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_seconds)
        options._threads = 1
        return GlooGroup(ProcessGroupGloo(store, rank, size, options))

    def error(self, _group: Any) -> None:
        """Its operations raise themselves what goes wrong."""
