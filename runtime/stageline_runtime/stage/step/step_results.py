"""What running a plan gives the stage loop: sampled rows, or the promise of them while the device still works."""

from typing import Protocol

from stageline_runtime.plan_bus.messages import SampledRow


class PendingRows(Protocol):
    """Rows that a device is sampling."""

    def copy_out(self) -> None:
        """Queue their copy to the host; after everything that other stages wait for."""

    def rows(self) -> tuple[SampledRow, ...]:
        """The rows, after waiting for the copy; asked again, the same."""


Sampled = tuple[SampledRow, ...] | PendingRows
