"""Graphs of CPU work that behave as CUDA's do: operations noted once with their tensors, and done again on these.

A replay knows nothing of Python: what was a number when the work was recorded stays that number, and every result goes
to the memory that it had then. Reading a value on the host while recording is an error, as it is on a GPU.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stageline_runtime.accelerator.protocol import Graph

Made = TypeVar("Made")
READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal")


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.name().split(".")[0] not in READS, f"{func} waits for the device while a graph is recorded"
        result = func(*args, **(kwargs or {}))
        self.noted.append((func, args, kwargs or {}, result))
        return result


class _Replay:
    def __init__(self, noted: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]) -> None:
        self._noted = noted

    def replay(self) -> None:
        """Do everything again on the same tensors."""
        for func, args, kwargs, result in self._noted:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordedOperations:
    """A `GraphRecorder` for the CPU."""

    def record(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        work()
        with _Noting() as noting:
            made = work()
        return _Replay(noting.noted), made
