"""The exchanges of a stage's ranks that have a device each: collectives of a communicator, queued behind the compute.

A call queues its exchange on the stream that computes, and returns; the host doesn't wait. One event behind each
exchange shows the progress: the stage waits in the oldest exchange that the device has not passed. Each rank writes to
the stage's `RankArea` how many exchanges it has queued, so that the others can name the late one. No tensor crosses
that area here. The device also times exchanges: every seventh has an event before it too, and represents seven, so that
a step of many layers costs the host few extra events.

The supervisor notices a lost rank and ends the area, and `check` raises. `check` also finds NCCL's own errors; a failed
exchange never ends on the device.

Empty tensors are not exchanged; they are empty on all ranks. Sums are the communicator's: every rank gets the same
ones, in NCCL's order and in the tensor's own type.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions, Store

from stageline_runtime.accelerator.protocol import Accelerator, Event
from stageline_runtime.ranks.errors import RanksEndedError
from stageline_runtime.ranks.exchange_times import ExchangeTimes, UnfinishedExchange
from stageline_runtime.ranks.rank_area import RankArea

MOST_KEPT: Final = 512
"""Exchanges that are remembered before the older half is looked at, and forgotten where the device is past it."""

TIMED_EVERY: Final = 7
"""Which exchanges are timed. Odd, since layers have two each: so both take their turns."""


class RankBackend(Protocol):
    """Makes communicators among the ranks of a stage, and tells their errors."""

    @property
    def name(self) -> str:
        """As people know it."""

    def open(self, store: Store, rank: int, size: int, device: torch.device, timeout_seconds: float) -> Any:
        """One rank's end of a communicator, with the methods of torch's process groups; raises RuntimeError.

        Its own limit for an exchange is `timeout_seconds`, which is longer than any that is watched. An exchange on
        the stream that computes may return None in place of a work, as those of `ProcessGroupNCCL` do.
        """

    def error(self, group: Any) -> str | None:
        """What went wrong in any exchange so far, if something did."""


@dataclass(slots=True)
class _Queued:
    number: int
    """Of the exchange, from 1."""
    operation: str
    behind: Event | None = None
    """None: the host has not come past the call."""


class _Timed(NamedTuple):
    """The ends of an exchange, the wait for the others included."""

    before: Event
    behind: Event


class DeviceRanks:
    """One rank's end of a communicator; a `RankGroup`."""

    def __init__(
        self,
        group: Any,
        backend: RankBackend,
        accelerator: Accelerator,
        area: RankArea,
        rank: int,
    ) -> None:
        """`group` is what `backend` opened for this `rank` and the size of `area`."""
        self.rank = rank
        self.size = area.size
        self._group = group
        self._backend = backend
        self._accelerator = accelerator
        self._area = area
        self.observe: Callable[[str], None] | None = None
        """Called with the name of each exchange as it is queued."""
        self.times = ExchangeTimes()
        self._count = 0
        self._queued: list[_Queued] = []
        self._timed: deque[_Timed] = deque()
        # On the stream that is active, in place of one of the communicator's own.
        self._reduce, self._gather, self._scatter = AllreduceOptions(), AllgatherOptions(), ReduceScatterOptions()
        for options in (self._reduce, self._gather, self._scatter):
            options.asyncOp = False

    def all_reduce(self, rows: Tensor, operation: str, /) -> Tensor:
        """The sum takes the place of `rows`, where these are contiguous."""
        rows = rows.contiguous()
        if rows.numel():
            self._queue(operation, lambda: self._group.allreduce([rows], self._reduce))
        return rows

    def all_gather(self, rows: Tensor, operation: str, /) -> Tensor:
        rows = rows.contiguous()
        gathered = rows.new_empty((self.size, *rows.shape))
        if rows.numel():
            all_rows, own = gathered.view(-1), rows.view(-1)
            self._queue(operation, lambda: self._group._allgather_base(all_rows, own, self._gather))
        return gathered

    def reduce_scatter(self, rows: Tensor, operation: str, /) -> Tensor:
        if rows.shape[0] != self.size:
            raise ValueError(f"{operation}: {rows.shape[0]} parts for {self.size} ranks")
        rows = rows.contiguous()
        part = rows.new_empty(rows.shape[1:])
        if part.numel():
            own, all_rows = part.view(-1), rows.view(-1)
            self._queue(operation, lambda: self._group._reduce_scatter_base(own, all_rows, self._scatter))
        return part

    def check(self) -> None:
        """Whether no error has occurred so far; never waits. Adds up the exchange times measured since the last call.

        Raises:
            RanksEndedError: another rank has ended, or the communicator has failed.
        """
        if self._area.is_ended:
            raise RanksEndedError(self._present_operation())
        error = self._backend.error(self._group)
        if error is not None:
            raise RanksEndedError(self._present_operation(), f"rank {self.rank}: {error}")
        while self._timed and self._timed[0].behind.is_done():
            timed = self._timed.popleft()
            self.times.seconds += TIMED_EVERY * timed.behind.seconds_since(timed.before)
            self.times.count += TIMED_EVERY

    def unfinished(self) -> UnfinishedExchange | None:
        """The oldest exchange that the device has not passed, and the ranks that have not queued it; for any thread."""
        for queued in self._queued[:]:
            if queued.behind is None or not queued.behind.is_done():
                late = (rank for rank in self._area.ranks_before(queued.number) if rank != self.rank)
                return UnfinishedExchange(queued.operation, tuple(late))
        return None

    def close(self) -> None:
        """Give up everything outstanding: an exchange with a lost rank would never end."""
        self._group.abort()

    def _queue(self, operation: str, call: Callable[[], Any]) -> None:
        if self.observe is not None:
            self.observe(operation)
        self._count += 1
        queued = _Queued(self._count, operation)
        self._queued.append(queued)
        is_timed = self.times.is_computing and self._count % TIMED_EVERY == 0
        before = self._accelerator.main.record(timed=True) if is_timed else None
        try:
            if (work := call()) is not None:
                work.wait()  # the stream does; where the host is the device, it waits for the result
        except RuntimeError as error:
            raise RanksEndedError(operation, f"rank {self.rank}: {str(error).splitlines()[0]}") from error
        self._area.tell(self.rank, self._count)
        queued.behind = self._accelerator.main.record(timed=is_timed)
        if before is not None:
            self._timed.append(_Timed(before, queued.behind))
        self._forget_finished()

    def _forget_finished(self) -> None:
        """Streams run in order, so that all before a finished exchange are finished too."""
        if len(self._queued) <= MOST_KEPT:
            return
        newest = self._queued[MOST_KEPT // 2].behind
        if newest is not None and newest.is_done():
            del self._queued[: MOST_KEPT // 2 + 1]

    def _present_operation(self) -> str:
        unfinished = self.unfinished()
        return "between two exchanges" if unfinished is None else unfinished.operation
