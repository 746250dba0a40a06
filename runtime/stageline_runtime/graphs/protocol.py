"""What a model offers that can run captured, and what it says about the capture. The seam for other devices."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from stageline_runtime.plan_bus.messages import GraphMode

CaptureProgress = Callable[[str], None]
"""Called with a sentence before each part of the capture."""


class GraphsUnavailableError(Exception):
    """The graphs asked for can't be had for this model on this machine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSizes:
    """Token counts of plans that capturing must provide for."""

    decode: tuple[int, ...]
    """Padded sizes of plans of single-token rows."""
    step: tuple[int, ...]
    """Padded sizes of other plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What a capture made and cost."""

    graphs: int
    seconds: float
    memory_bytes: int
    """Growth of the process's resident memory, or of the device's."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """A stage's model whose `layers` can run captured, in the mode that a plan names."""

    def capture_graphs(
        self, graphs: GraphMode, sizes: CaptureSizes, cache_dir: Path, progress: CaptureProgress
    ) -> CaptureReport:
        """Capture what plans up to `graphs` need, before the stage says that it has loaded; touches no slot.

        Raises:
            GraphsUnavailableError: this model or machine can't.
        """
