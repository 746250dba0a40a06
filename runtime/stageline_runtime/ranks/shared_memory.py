"""Exchanges between the ranks of a stage through shared memory, for ranks on CPUs of one machine.

Every exchange is one barrier (`native/rank_exchange.h`) in the stage's `RankArea`. A waiting rank returns to Python ten
times a second so that signals and watchdogs run. It waits until the other ranks arrive or the supervisor ends the area.
The supervisor ends the area when a rank ends. Ranks that make different exchanges get an error and never mix their
data.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from stageline_runtime.native.build import NativeUnavailableError, load_library
from stageline_runtime.ranks.errors import RankMismatchError, RanksEndedError
from stageline_runtime.ranks.exchange_times import ExchangeTimes
from stageline_runtime.ranks.rank_area import NAME_BYTES, Progress, RankArea, Round, area_bytes

_WAIT_NANOSECONDS = 100_000_000
_DONE, _WAITING, _ENDED, _DIFFER = range(4)
_REDUCE, _GATHER, _SCATTER = range(3)
_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTES = 3
"""What is only copied needs no type."""


class _Library:
    """The functions of `native/rank_exchange.h`, typed."""

    def __init__(self, area: RankArea) -> None:
        library = load_library()
        if not hasattr(library, "rank_exchange"):
            raise NativeUnavailableError("ranks share memory on Linux only")
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.rank_area_bytes.argtypes, library.rank_area_bytes.restype = (number, number), number
        compiled = library.rank_area_bytes(area.size, area.buffer_bytes)
        assert compiled == area_bytes(area.size, area.buffer_bytes), f"the compiled area takes {compiled} bytes"
        self.exchange = library.rank_exchange
        self.exchange.argtypes = (pointer, number, pointer, pointer, pointer, number, number)
        self.exchange.restype = number
        self.describe = library.rank_description
        self.describe.argtypes, self.describe.restype = (pointer, number, ctypes.c_uint32, pointer), None


class SharedMemoryRanks:
    """One rank's end of an area; a `RankGroup`. Calls `observe` with the name of each exchange as it begins."""

    def __init__(self, area: RankArea, rank: int, observe: Callable[[str], None] | None = None) -> None:
        """Raises NativeUnavailableError where the compiled exchanges can't be had, ValueError for no such rank."""
        if not 0 <= rank < area.size:
            raise ValueError(f"rank {rank} is not one of {area.size}")
        self.rank = rank
        self.size = area.size
        self._area = area
        self._library = _Library(area)
        self._observe = observe
        self.times = ExchangeTimes()
        self._progress = Progress()
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
        progress.round.name = operation.encode()[: NAME_BYTES - 1]
        progress.done = progress.is_published = 0
        arguments = (given.data_ptr(), result.data_ptr(), given.element_size(), _WAIT_NANOSECONDS)
        status = _WAITING
        began = time.perf_counter()
        while status == _WAITING:
            status = self._library.exchange(self._area.address, self.rank, self._progress_address, *arguments)
        if self.times.is_computing:
            self.times.seconds += time.perf_counter() - began
            self.times.count += 1
        if status == _ENDED:
            raise RanksEndedError(operation)
        if status == _DIFFER:
            raise self._mismatch()

    def _mismatch(self) -> RankMismatchError:
        other = Round()
        progress = self._progress
        self._library.describe(self._area.address, progress.differs, progress.rounds, ctypes.addressof(other))
        return RankMismatchError(self.rank, str(progress.round), int(progress.differs), str(other))


def _type_of(rows: Tensor) -> int:
    if rows.dtype not in _TYPES:
        raise TypeError(f"sums over ranks are of {', '.join(map(str, _TYPES))}, not of {rows.dtype}")
    return _TYPES[rows.dtype]
