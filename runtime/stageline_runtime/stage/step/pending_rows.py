"""A plan's sampled rows on their way from the device to the host, which a CPU has at once."""

from collections.abc import Callable, Sequence

from torch import Tensor

from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import ComputeDevice, Event
from stageline_runtime.plan_bus.messages import SampledRow

Rows = tuple[SampledRow, ...]


class PendingRows:
    def __init__(
        self, device: ComputeDevice, tensors: Sequence[Tensor], read: Callable[[Sequence[Tensor]], Rows]
    ) -> None:
        """`read` makes the rows from the host's copies of `tensors`, which are on the device; it is called once."""
        self._device = device
        self._tensors = tensors
        self._read = read
        self._copied: Event | None = None
        self._rows: Rows | None = None

    @classmethod
    def known(cls, rows: Rows) -> "PendingRows":
        """Rows that the host has."""
        pending = cls(HOST, (), lambda _: rows)
        pending.rows()
        return pending

    @property
    def is_known(self) -> bool:
        """Whether they have been read."""
        return self._rows is not None

    def copy_out(self) -> Event:
        """Queue their copy to the host; after everything that other stages wait for."""
        if self._copied is None:
            self._tensors = [self._device.to_host(tensor) for tensor in self._tensors]
            self._copied = self._device.record()
        return self._copied

    def rows(self) -> Rows:
        """The rows, after waiting for the copy; called again, the same."""
        if self._rows is None:
            self.copy_out().wait()
            self._rows = self._read(self._tensors)
            # `SamplingState` keeps this object; the log probabilities of a whole vocabulary must not stay with it.
            del self._tensors, self._read
        return self._rows
