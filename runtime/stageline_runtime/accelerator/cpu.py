"""The CPU as a `ComputeDevice`: each call has done its work when it returns."""

import time
from typing import Final, cast

import torch

from stageline_runtime.accelerator.protocol import Event


class HostEvent:
    """Done when it is made."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is outstanding."""

    def seconds_since(self, earlier: Event) -> float:
        return self._seconds - cast(HostEvent, earlier)._seconds


class CpuDevice:
    device = torch.device("cpu")

    def record(self, *, timed: bool = False) -> Event:  # noqa: ARG002 - the protocol's
        return HostEvent()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fill(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        target.copy_(tensor)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


HOST: Final = CpuDevice()
