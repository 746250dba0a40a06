"""A CUDA device behind `protocol.Accelerator`. No GPU has run this yet (docs/gpu.md)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stageline_runtime.accelerator.graph import CudaGraphRecorder, GraphRecorder
from stageline_runtime.accelerator.protocol import Event, Stream


class CudaEvent:
    """A CUDA event; waiting gives up the core instead of spinning."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)
        self.event.record(stream)

    def is_done(self) -> bool:
        """Whether the work before it is done."""
        return self.event.query()

    def wait(self) -> None:
        """Block this thread until it is."""
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """Seconds on the device's clock."""
        assert isinstance(earlier, CudaEvent), earlier
        return earlier.event.elapsed_time(self.event) / 1000


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self, *, timed: bool = False) -> Event:
        """Mark the end of what is queued now."""
        return CudaEvent(self._stream, timed=timed)

    def wait_for(self, event: Event) -> None:
        """Let what is queued from now on begin after `event`."""
        assert isinstance(event, CudaEvent), event
        self._stream.wait_event(event.event)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Queue what the block does here."""
        with torch.cuda.stream(self._stream):
            yield


class CudaAccelerator:
    """The first visible device; a pod that asks for one GPU sees that one alone."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        # Graphs can't be captured on the default stream, and it would order itself against all others.
        stream = torch.cuda.Stream(self.device)
        torch.cuda.set_stream(stream)
        self.main: Stream = CudaStream(stream)
        properties = torch.cuda.get_device_properties(self.device)
        self.num_processors = int(properties.multi_processor_count)
        self._identity = f"{torch.cuda.get_device_name(self.device)} {properties.uuid}"

    def side_stream(self) -> Stream:
        """Another queue, ahead of compute where the device has to choose: what it carries is small and waited for."""
        return CudaStream(torch.cuda.Stream(self.device, priority=-1))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device reads and writes by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the active stream."""
        target.copy_(source, non_blocking=True)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a small tensor of the host's to the device; torch keeps the pinned memory until it is."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def graph_recorder(self) -> GraphRecorder:
        """Records CUDA graphs."""
        return CudaGraphRecorder()

    def available_bytes(self) -> int:
        """Memory of the device that is free now."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def allocated_bytes(self) -> int:
        """Memory of the device that torch holds for this process, graphs' pools included."""
        return int(torch.cuda.memory_reserved(self.device))

    def identity(self) -> str:
        """Name and UUID: equal for processes that share the device."""
        return self._identity

    def synchronize(self) -> None:
        """Block until all queued work is done."""
        torch.cuda.synchronize(self.device)
