"""Device work recorded once and replayed: the same operations on the same memory, whatever lies in it by then."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

Made = TypeVar("Made")


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Queue all of it again on the active stream."""


class GraphRecorder(Protocol):
    """Records for one device; all graphs share one pool of memory, since none runs beside another."""

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        """Run `work` to warm it up, then record it; what it returned is written anew by each replay."""


class CudaGraphRecorder:
    """CUDA graphs. No GPU has run this yet (docs/gpu.md)."""

    WARM_UP_RUNS = 2
    """Kernels are compiled and library workspaces made by runs that aren't recorded."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        """As the protocol says; on the stream that is active, which may not be the default one."""
        stream = torch.cuda.current_stream()
        for _ in range(self.WARM_UP_RUNS):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            made = work()
        return graph, made
