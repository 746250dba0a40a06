"""What stages and transports need of a device that computes asynchronously.

Work queued on one stream runs in order; only events order streams against each other. Only `Event.wait` and
`Accelerator.synchronize` wait on the host: neither belongs between a plan's inputs and its outputs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

Made = TypeVar("Made")


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether the work before it is done; never waits."""

    def wait(self) -> None:
        """Block this thread until the work before it is done."""

    def seconds_since(self, earlier: "Event") -> float:
        """Seconds on the device's clock; both must be done and must have been made with `timed`."""


class Stream(Protocol):
    """A queue of device work."""

    def record(self, *, timed: bool = False) -> Event:
        """Mark the end of the work queued so far."""

    def wait_for(self, event: Event) -> None:
        """Make work queued after this call start after `event`."""

    def active(self) -> AbstractContextManager[None]:
        """Queue what the block does here."""


class Graph(Protocol):
    """Device work recorded once: the same operations on the same memory, whatever lies in it by then."""

    def replay(self) -> None:
        """Queue all of it again on the active stream."""


class GraphRecorder(Protocol):
    """Records for one device; all graphs share one pool of memory, since none runs beside another."""

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        """Run `work` to warm it up, then record it; each replay overwrites the tensors that it returned."""


class ComputeDevice(Protocol):
    """The device that a stage computes on: the CPU, where events are always done, or an accelerator."""

    @property
    def device(self) -> torch.device:
        """For tensors."""

    def record(self, *, timed: bool = False) -> Event:
        """Mark the end of the compute that is queued now."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a small tensor of the host's to the device; returns the copy."""

    def fill(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Queue the copy of a small tensor of the host's into `target`, which is on the device."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a tensor to the host; it is there once an event that is recorded behind it is done."""


class Accelerator(ComputeDevice, Protocol):
    """One device. `main` is the stream that layers run on, and the one that is active outside of any block."""

    @property
    def main(self) -> Stream:
        """Where compute is queued."""

    @property
    def num_processors(self) -> int:
        """Blocks of a kernel that run at once, roughly."""

    def queues_experts(self, dtype: torch.dtype) -> bool:
        """Whether a grouped product of this dtype is queued without a wait for the device, so it can be captured."""

    def side_stream(self) -> Stream:
        """Another queue."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device reads and writes directly, uninitialised."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the active stream; host memory on either side must be pinned and stay until it is done."""

    def graph_recorder(self) -> GraphRecorder:
        """Records graphs of this device's work."""

    def available_bytes(self) -> int:
        """Memory of the device that is free now."""

    def allocated_bytes(self) -> int:
        """Memory of the device that this process holds."""

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """Peak device memory of `work` in bytes beyond current use; it is freed afterwards. For loading only."""

    def identity(self) -> str:
        """Equal for processes that share the device."""

    def synchronize(self) -> None:
        """Block until all queued work is done; for loading and ending only."""
