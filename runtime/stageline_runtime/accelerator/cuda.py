"""A CUDA device behind `protocol.Accelerator`, and the choice between one and the CPU. One has run it
(docs/gpu.md).
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.protocol import Accelerator, Event, Graph, GraphRecorder, Made, Stream
from stageline_runtime.termination import RuntimeFailure

GROUPED_PRODUCT_MAJORS: Final = (9, 10)
"""Hopper, and Blackwell of data centres (not sm_120): where torch has one kernel for a grouped product in bfloat16.
Elsewhere it copies to the host how many rows each group has."""


class CudaEvent:
    """A CUDA event; waiting gives up the core instead of spinning."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)
        self.event.record(stream)

    def is_done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent), earlier
        return earlier.event.elapsed_time(self.event) / 1000


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def record(self, *, timed: bool = False) -> Event:
        return CudaEvent(self._stream, timed=timed)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), event
        self._stream.wait_event(event.event)

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield


class CudaGraphRecorder:
    WARM_UP_RUNS = 2
    """Kernels are compiled and library workspaces made by runs that aren't recorded."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        # On the stream that is active, which may not be the default one.
        stream = torch.cuda.current_stream()
        for _ in range(self.WARM_UP_RUNS):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            made = work()
        return graph, made


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
        self._capability_major = int(properties.major)
        self._identity = f"{torch.cuda.get_device_name(self.device)} {properties.uuid}"

    def record(self, *, timed: bool = False) -> Event:
        return self.main.record(timed=timed)

    def queues_experts(self, dtype: torch.dtype) -> bool:
        return dtype is torch.bfloat16 and self._capability_major in GROUPED_PRODUCT_MAJORS

    def side_stream(self) -> Stream:
        """Another queue, ahead of compute where the device has to choose: what it carries is small and waited for."""
        return CudaStream(torch.cuda.Stream(self.device, priority=-1))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a small tensor of the host's to the device; torch keeps the pinned memory until it is."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def fill(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        self.copy(target, tensor.pin_memory())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        target = self.pinned(tuple(tensor.shape), tensor.dtype)
        self.copy(target, tensor)
        return target

    def graph_recorder(self) -> GraphRecorder:
        return CudaGraphRecorder()

    def available_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.device))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        work()
        self.synchronize()
        peak = torch.cuda.max_memory_reserved(self.device)
        torch.cuda.empty_cache()
        return int(peak - before)

    def identity(self) -> str:
        """Name and UUID: equal for processes that share the device."""
        return self._identity

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


logger = logging.getLogger(__name__)


def load_kernels_eagerly() -> None:
    """For a process with peers, before it has a device; the start takes some seconds longer.

    Loading a kernel waits for running ones: one that waits for a peer, which waits for us, would never end.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def choose_accelerator(asked: str) -> Accelerator | None:
    """The accelerator to compute on, None for the CPU. `asked` is `spec.engine.device`.

    Raises:
        RuntimeFailure: class BadConfig: a device was asked for that this container doesn't have.
    """
    if asked == "cpu":
        return None
    if torch.cuda.is_available():
        from stageline_runtime.accelerator.cuda import CudaAccelerator

        accelerator = CudaAccelerator()
        logger.info("computing on %s", accelerator.identity())
        return accelerator
    if asked == "auto":
        return None
    raise RuntimeFailure(
        FailureClass.BAD_CONFIG,
        f"spec.engine.device is {asked}, but {_why_not()}; give the stage a GPU (resources nvidia.com/gpu) or set it "
        "to auto or cpu",
        operation="choose the device",
    )


def _why_not() -> str:
    if torch.version.cuda is None:
        return "this image's torch is built without CUDA"
    return f"no CUDA device is visible to torch {torch.__version__}"
