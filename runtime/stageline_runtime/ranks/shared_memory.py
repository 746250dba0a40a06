"""The exchanges of a stage's ranks through memory that all of them map: for ranks on CPUs of one machine.

The supervisor makes the area (`RankArea.create`), an anonymous file that needs neither a writable root nor a mount, and
its rank processes inherit the descriptor. Every exchange is one barrier (`native/rank_exchange.h`). A rank that waits
comes back to Python ten times a second, so that signals and watchdogs have their turn; it waits until the others come,
or until the supervisor, which sees a rank's end, ends the area. Ranks that don't make the same exchange are told so and
never mix their data.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from stageline_runtime.native.build import NativeUnavailableError, load_library
from stageline_runtime.ranks.errors import RankMismatchError, RanksEndedError

_WAIT_NANOSECONDS = 100_000_000
_NAME_BYTES = 96
_ALIGNMENT = 128
_DONE, _WAITING, _ENDED, _DIFFER = range(4)
_REDUCE, _GATHER, _SCATTER = range(3)
_KIND_NAMES = ("all-reduce", "all-gather", "reduce-scatter")
_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTES = 3
"""What is only copied needs no type."""


class _Round(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("name", ctypes.c_char * _NAME_BYTES),
    )

    def __str__(self) -> str:
        return f"{self.name.decode(errors='replace')} ({_KIND_NAMES[self.kind]} of {self.count} elements)"


class _Progress(ctypes.Structure):
    _fields_ = (
        ("round", _Round),
        ("done", ctypes.c_int64),
        ("rounds", ctypes.c_uint32),
        ("is_published", ctypes.c_uint32),
        ("differs", ctypes.c_int64),
    )


class _Library:
    """The functions of `native/rank_exchange.h`, typed."""

    def __init__(self) -> None:
        library = load_library()
        if not hasattr(library, "rank_exchange"):
            raise NativeUnavailableError("ranks share memory on Linux only")
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.area_bytes = library.rank_area_bytes
        self.area_bytes.argtypes, self.area_bytes.restype = (number, number), number
        self.begin = library.rank_area_begin
        self.begin.argtypes, self.begin.restype = (pointer, number, number), None
        self.size = library.rank_area_size
        self.size.argtypes, self.size.restype = (pointer,), number
        self.end = library.rank_area_end
        self.end.argtypes, self.end.restype = (pointer,), None
        self.exchange = library.rank_exchange
        self.exchange.argtypes = (pointer, number, pointer, pointer, pointer, number, number)
        self.exchange.restype = number
        self.describe = library.rank_description
        self.describe.argtypes, self.describe.restype = (pointer, number, ctypes.c_uint32, pointer), None


class RankArea:
    """The memory that the ranks of one stage share, mapped into this process."""

    def __init__(self, descriptor: int) -> None:
        """Map the area behind `descriptor`, which may be closed afterwards.

        Raises:
            NativeUnavailableError: the compiled exchanges can't be had on this machine.
            ValueError: it is no such area.
        """
        self.library = _Library()
        self._memory = mmap.mmap(descriptor, 0)
        self._view = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._view)
        self.size: int = self.library.size(self.address)
        if not self.size:
            raise ValueError(f"descriptor {descriptor} is no area of ranks")

    @staticmethod
    def create(size: int, buffer_bytes: int) -> int:
        """A descriptor of a new area for `size` ranks. Exchanges of more than `buffer_bytes` take several rounds.

        Raises:
            NativeUnavailableError: the compiled exchanges can't be had on this machine.
            ValueError: a buffer would not hold one element for each rank.
        """
        if size < 1 or buffer_bytes < 8 * size:
            raise ValueError(f"an area of {size} ranks with buffers of {buffer_bytes} bytes")
        library = _Library()
        buffer_bytes = -(-buffer_bytes // _ALIGNMENT) * _ALIGNMENT
        descriptor = os.memfd_create("stageline-ranks")
        os.ftruncate(descriptor, library.area_bytes(size, buffer_bytes))
        memory = mmap.mmap(descriptor, 0)
        view = ctypes.c_char.from_buffer(memory)
        library.begin(ctypes.addressof(view), size, buffer_bytes)
        del view
        memory.close()
        return descriptor

    def end(self) -> None:
        """Let every rank that waits, now or later, fail with `RanksEndedError`."""
        self.library.end(self.address)

    def close(self) -> None:
        """Unmap the area in this process."""
        del self._view
        self._memory.close()


class SharedMemoryRanks:
    """One rank's end of an area; a `RankGroup`. `observe` is told the name of each exchange as it begins."""

    def __init__(self, area: RankArea, rank: int, observe: Callable[[str], None] | None = None) -> None:
        if not 0 <= rank < area.size:
            raise ValueError(f"rank {rank} is not one of {area.size}")
        self.rank = rank
        self.size = area.size
        self._area = area
        self._observe = observe
        self._progress = _Progress()
        self._progress_address = ctypes.addressof(self._progress)

    def all_reduce(self, rows: Tensor, operation: str, /) -> Tensor:
        """The sum takes the place of `rows`, where these are contiguous."""
        rows = rows.contiguous()
        self._exchange(_REDUCE, _type_of(rows), rows.numel(), rows, rows, operation)
        return rows

    def all_gather(self, rows: Tensor, operation: str, /) -> Tensor:
        rows = rows.contiguous()
        gathered = rows.new_empty((self.size, *rows.shape))
        self._exchange(_GATHER, _BYTES, rows.numel(), rows, gathered, operation)
        return gathered

    def reduce_scatter(self, rows: Tensor, operation: str, /) -> Tensor:
        if rows.shape[0] != self.size:
            raise ValueError(f"{operation}: {rows.shape[0]} parts for {self.size} ranks")
        rows = rows.contiguous()
        part = rows.new_empty(rows.shape[1:])
        self._exchange(_SCATTER, _type_of(rows), part.numel(), rows, part, operation)
        return part

    def close(self) -> None:
        self._area.close()

    def _exchange(self, kind: int, element: int, count: int, given: Tensor, result: Tensor, operation: str) -> None:
        if self._observe is not None:
            self._observe(operation)
        progress = self._progress
        progress.round.kind, progress.round.type, progress.round.count = kind, element, count
        progress.round.name = operation.encode()[: _NAME_BYTES - 1]
        progress.done = progress.is_published = 0
        arguments = (given.data_ptr(), result.data_ptr(), given.element_size(), _WAIT_NANOSECONDS)
        status = _WAITING
        while status == _WAITING:
            status = self._area.library.exchange(self._area.address, self.rank, self._progress_address, *arguments)
        if status == _ENDED:
            raise RanksEndedError(operation)
        if status == _DIFFER:
            raise self._mismatch()

    def _mismatch(self) -> RankMismatchError:
        other = _Round()
        progress = self._progress
        self._area.library.describe(self._area.address, progress.differs, progress.rounds, ctypes.addressof(other))
        return RankMismatchError(self.rank, str(progress.round), int(progress.differs), str(other))


def _type_of(rows: Tensor) -> int:
    if rows.dtype not in _TYPES:
        raise TypeError(f"sums over ranks are of {', '.join(map(str, _TYPES))}, not of {rows.dtype}")
    return _TYPES[rows.dtype]
