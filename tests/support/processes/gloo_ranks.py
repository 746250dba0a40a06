"""Exchanges of ranks whose device is the CPU in disguise: gloo's communicators behind the interface of NCCL's."""

import os
import signal
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store


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
        return ProcessGroupGloo(store, rank, size, options)

    def error(self, _group: Any) -> None:
        """Its operations raise themselves what goes wrong."""
